"""How a model is sharded over a mesh: which of its parameters over which axes, and where results are summed.

Query heads and the widths of MLPs are sharded over all axes of heads and contexts (Megatron-LM, arXiv:1909.08053):
each block's products are summed once. Experts are sharded over their own axes, or else by width. The vocabulary is
sharded if the devices divide it. Norms, routers and the low-rank projections before heads are on every device.
"""

from collections.abc import Iterator

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mla_attn.models import decoder, deepseek
from mla_attn.models.families import Model
from mla_attn.models.layers import MLP, Embedding, Linear
from mla_attn.models.moe import ClampedMoE, MoE
from mla_attn.parallel import Parallelism

Shard = tuple[nnx.Param, P]


def shard_model[M: Model](model: M, parallelism: Parallelism) -> M:
    """Shards a model that is on one device, in place, and returns it; ``load_checkpoint`` reads a sharded model.

    Raises:
        ValueError: the devices cannot share the heads, the widths or the experts; or the model is sharded already.
    """
    if model.layout is not None:
        raise ValueError(f"model is sharded already, with {model.layout}")
    shardings = mark(model, parallelism)
    for param in parameters(model):
        sharding = shardings.get(id(param), parallelism.sharding(P()))
        param.set_value(jax.device_put(param.get_value(), sharding))
    return model


def parameters(model: nnx.Module) -> list[nnx.Param]:
    """All parameters of a model."""
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)]


def mark(model: Model, parallelism: Parallelism) -> dict[int, NamedSharding]:
    """Tells the modules of a model, which may be abstract, over which axes they compute.

    Returns:
        The shardings of its parameters, by their ids; others are on every device.
    """
    model.layout = parallelism.layout
    return {id(param): parallelism.sharding(spec) for param, spec in _model(model, parallelism)}


def _model(model: Model, p: Parallelism) -> Iterator[Shard]:
    yield from _embedding(model.embed_tokens, p)
    if hasattr(model, "lm_head"):
        yield from _head(model.lm_head, p)
    for layer in model.layers:
        yield from _layer(layer, p)
    if isinstance(model, deepseek.DeepseekForCausalLM) and hasattr(model, "mtp"):
        yield from _embedding(model.mtp.embed_tokens, p)
        yield from _head(model.mtp.head, p)
        yield from _layer(model.mtp.block, p)


def _embedding(embedding: Embedding, p: Parallelism) -> Iterator[Shard]:
    axes = p.layout.query_heads
    if axes and embedding.embedding.shape[0] % p.size("query_heads") == 0:
        embedding.sharded = axes
        yield embedding.embedding, P(axes)


def _head(head: Linear, p: Parallelism) -> Iterator[Shard]:
    axes = p.layout.query_heads
    if axes and head.kernel.shape[1] % p.size("query_heads") == 0:
        head.gathered = axes
        yield from _columns(head, axes)


def _layer(layer: deepseek.DecoderLayer | decoder.DecoderLayer, p: Parallelism) -> Iterator[Shard]:
    axes, attention = p.layout.query_heads, layer.self_attn
    _check("num_heads", attention.spec.num_heads, p.size("query_heads"))
    if isinstance(attention, deepseek.Attention):
        yield from _columns(attention.q_proj if hasattr(attention, "q_proj") else attention.q_b_proj, axes)
        yield attention.w_uk, P(axes)
        yield attention.w_uv, P(axes)
    else:
        yield from _grouped(attention, p)
    yield from _rows(attention.o_proj, axes)
    if isinstance(layer.mlp, MLP):
        yield from _mlp(layer.mlp, p)
    else:
        yield from _experts(layer.mlp, p)


def _grouped(attention: decoder.Attention, p: Parallelism) -> Iterator[Shard]:
    """Keys and values are those of KV heads, which context ranks share; fewer than devices are on every device."""
    yield from _columns(attention.q_proj, p.layout.query_heads)
    attention.spec.shard(heads=p.size("heads"))
    if attention.spec.num_kv_heads % p.size("heads") == 0:
        yield from _columns(attention.k_proj, p.layout.heads)
        yield from _columns(attention.v_proj, p.layout.heads)
    if hasattr(attention, "sinks"):
        yield attention.sinks, P(p.layout.query_heads)


def _mlp(mlp: MLP, p: Parallelism) -> Iterator[Shard]:
    axes = p.layout.query_heads
    _check("the width of an MLP", mlp.down_proj.kernel.shape[0], p.size("query_heads"))
    yield from _columns(mlp.gate_proj, axes)
    yield from _columns(mlp.up_proj, axes)
    yield from _rows(mlp.down_proj, axes)


def _experts(moe: MoE | ClampedMoE, p: Parallelism) -> Iterator[Shard]:
    layout = p.layout
    wide, biases = [moe.gate_proj, moe.up_proj], []
    if isinstance(moe, ClampedMoE):
        biases = [moe.gate_bias, moe.up_bias]
    elif moe.has_shared:
        yield from _mlp(moe.shared_experts, p)
    if layout.experts:
        _check("the number of experts", moe.down_proj.shape[0], p.size("experts"))
        moe.experts, moe.tokens = layout.experts, tuple(axis for axis in layout.experts if axis in layout.batch)
        last = [moe.down_bias] if isinstance(moe, ClampedMoE) else []
        yield from ((param, P(layout.experts)) for param in (*wide, moe.down_proj, *biases, *last))
        return
    _check("the width of an expert", moe.down_proj.shape[1], p.size("query_heads"))
    axes = moe.summed = layout.query_heads
    yield from ((param, P(None, None, axes)) for param in wide)
    yield moe.down_proj, P(None, axes)
    yield from ((bias, P(None, axes)) for bias in biases)


def _columns(linear: Linear, axes: tuple[str, ...]) -> Iterator[Shard]:
    yield linear.kernel, P(None, axes)
    if hasattr(linear, "bias"):
        yield linear.bias, P(axes)


def _rows(linear: Linear, axes: tuple[str, ...]) -> Iterator[Shard]:
    linear.summed = axes
    yield linear.kernel, P(axes)


def _check(name: str, value: int, devices: int) -> None:
    if value % devices:
        raise ValueError(f"{name}={value} must be a multiple of the {devices} devices that share it")
