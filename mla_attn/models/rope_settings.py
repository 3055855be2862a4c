"""The reader of the rope keys of a ``config.json``, which have two spellings and several types."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mla_attn.models.settings import Setting, read_settings, section
from mla_attn.text import shown

Table = Mapping[str, Setting]


class RopeKeys(NamedTuple):
    """The rope settings of a file.

    Attributes:
        name: name of the object with the keys, for messages.
        keys: the object's keys that are not null.
        kind: "default", "yarn", ...
        theta: base of the frequencies.
    """

    name: str
    keys: dict[str, Any]
    kind: str
    theta: float


def read_rope(data: Mapping[str, Any], *, theta: Table, common: Table, kinds: Mapping[str, Table]) -> RopeKeys:
    """Reads the keys of ``rope_scaling`` or of the newer ``rope_parameters``, which includes ``rope_theta``.

    Args:
        data: the whole file.
        theta: table for ``rope_theta``, which may be in the file or among the rope keys.
        common: keys that every type may have, including ``type``.
        kinds: further keys of each type.

    Raises:
        ValueError: both spellings are present, a type or key is not supported, or a value is invalid.
    """
    names = [name for name in ("rope_scaling", "rope_parameters") if data.get(name) is not None]
    if len(names) > 1:
        raise ValueError("rope_scaling and rope_parameters are two spellings of one thing; give one")
    name = names[0] if names else "rope_scaling"
    keys = section(name, data[name]) if names else {}
    keys = {key: value for key, value in keys.items() if value is not None}  # null means absent
    base = read_settings(keys, theta, within=name) if "rope_theta" in keys else read_settings(data, theta)
    kind = _type(name, keys, common["type"])
    fixed = read_settings(keys, {key: setting for key, setting in common.items() if key != "type"}, within=name)
    repeated, positions = fixed["max_position_embeddings"], data["max_position_embeddings"]  # some files repeat it
    if repeated not in (None, positions):
        raise ValueError(f"{name} max_position_embeddings={repeated} is not the file's own: {shown(positions)}")
    allowed = {"rope_theta", "rope_type", *common, *kinds[kind]}
    if unknown := sorted(keys.keys() - allowed):
        raise ValueError(
            f"{name} of type {kind!r} has keys that are not supported: {', '.join(map(shown, unknown))}; "
            f"supported: {', '.join(sorted(allowed))}"
        )
    return RopeKeys(name, keys, kind, base["rope_theta"])


def _type(name: str, keys: Mapping[str, Any], setting: Setting) -> str:
    kinds = [keys[key] for key in ("rope_type", "type") if key in keys]
    for kind in kinds:
        setting.kind(f"{name} type", kind)
    if len(set(kinds)) > 1:
        raise ValueError(f"{name} rope_type={kinds[0]!r} and type={kinds[1]!r} must be the same")
    return kinds[0] if kinds else setting.default
