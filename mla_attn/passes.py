"""Whole-model passes, one a mode, over padded arrays: what is compiled ahead of time and run by the generation loop.

Every pass is ``(state, pool, inputs) -> (outputs, pool)`` with ``inputs`` and ``outputs`` dicts of arrays, metadata
built inside. Requests with ``q_lens`` (or ``active``) 0 are padding. B requests, T packed rows, W pages per request, K
drafts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mla_attn import metadata as md
from mla_attn.buckets import Buckets
from mla_attn.cache import LatentPool
from mla_attn.models.deepseek import DeepseekForCausalLM
from mla_attn.speculative import accept_greedy

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Ladders and static sizes that the passes are compiled for.

    Attributes:
        batches: ladder of request counts B.
        prompt_rows: ladder of prompt tokens T in one prefill or extend call, all requests together.
        table_width: pages per request W.
        page_size: tokens per page P.
        max_len: most tokens of a request.
        num_drafts: drafts per verify step K; 0 for plain decoding.
        chunked: whether prompts come in several parts, so that ``extend`` is needed.
    """

    batches: tuple[int, ...]
    prompt_rows: tuple[int, ...]
    table_width: int
    page_size: int
    max_len: int
    num_drafts: int = 0
    chunked: bool = False


class Passes:
    """The passes of one model as ``Buckets``: attributes ``prefill``, ``extend``, ``decode`` and, with drafts,
    ``draft_prefill``, ``draft_decode``, ``target_verify``, ``draft_extend``."""

    def __init__(self, model: DeepseekForCausalLM, shapes: Shapes, *, implementation: str | None = None):
        if shapes.num_drafts and model.config.num_nextn_predict_layers == 0:
            raise ValueError(f"num_drafts={shapes.num_drafts} must be 0: the model has no MTP layer to draft with")
        self.shapes = shapes
        self.graphdef, self.state = nnx.split(model)
        self._implementation = implementation
        self._sizes: dict[str, Any] = {"page_size": shapes.page_size, "max_len": shapes.max_len}
        self._dim, self._dtype = model.config.hidden_size, model.embed_tokens.embedding[...].dtype
        self.prefill = Buckets("prefill", self._prompt("prefill"), self._prompt_rungs())
        self.extend = Buckets("extend", self._prompt("extend"), self._prompt_rungs())
        self.decode = Buckets("decode", self._decode, self._rungs(tokens=()))
        if shapes.num_drafts:
            k, hidden = shapes.num_drafts, (self._dim,)
            self.draft_prefill = Buckets("draft_prefill", self._draft_prefill, self._prompt_rungs(drafting=True))
            self.target_verify = Buckets("target_verify", self._target_verify, self._rungs(tokens=(), drafts=(k,)))
            self.draft_extend = Buckets(
                "draft_extend",
                self._draft_extend,
                self._rungs(emitted=(k + 1,), num_emitted=(), hidden=(k + 1, *hidden)),
            )
            self.draft_decode = Buckets(
                "draft_decode", self._draft_decode, self._rungs(drafts=(k,), step=None, hidden=hidden)
            )

    @property
    def buckets(self) -> list[Buckets]:
        """The ones a generation loop with these shapes calls."""
        used = [self.prefill, *([self.extend] if self.shapes.chunked else [])]
        if not self.shapes.num_drafts:
            return [*used, self.decode]
        drafting = [self.draft_decode] if self.shapes.num_drafts > 1 else []
        return [*used, self.draft_prefill, *drafting, self.target_verify, self.draft_extend]

    def _model(self, state: Any) -> DeepseekForCausalLM:
        return nnx.merge(self.graphdef, state)

    def _run(self, model, tokens, pool, metadata, mode):
        return model(tokens, pool, metadata, mode=mode, implementation=self._implementation)

    def _run_draft(self, model, hidden, tokens, pool, metadata, mode):
        return model.draft(hidden, tokens, pool, metadata, mode=mode, implementation=self._implementation)

    def _prompt(self, mode: str):
        def prompt(state, pool: LatentPool, x: Arrays) -> tuple[Arrays, LatentPool]:
            """Prompt parts: greedy token after each request's last row, and all hidden states."""
            model, m = self._model(state), self._prompt_metadata(x)
            hidden, pool = self._run(model, x["tokens"], pool, m, mode)
            return {"hidden": hidden, "tokens": _greedy(model.logits(_last(hidden, m)))}, pool

        return prompt

    def _draft_prefill(self, state, pool: LatentPool, x: Arrays) -> tuple[Arrays, LatentPool]:
        """Prompt parts through the draft layer: the first draft. A last row takes the token sampled after it if its
        ``next_tokens`` is -1, as it is in the last part of a prompt."""
        model, m = self._model(state), self._prompt_metadata(x)
        owner, _ = md.row_owners(m.q_starts, m.q_lens, m.slots.shape[0])
        tokens = jnp.where(x["next_tokens"] < 0, x["sampled"][owner], x["next_tokens"])
        hidden, pool = self._run_draft(model, x["hidden"], tokens, pool, m, "draft_extend")
        return self._first_draft(model, _last(hidden, m)), pool

    def _decode(self, state, pool: LatentPool, x: Arrays) -> tuple[Arrays, LatentPool]:
        """One token per active request; ``lens`` counts the cached tokens before and after."""
        model, lens = self._model(state), x["lens"] + x["active"]
        m = md.for_decode(x["page_table"], lens * x["active"], **self._sizes)
        hidden, pool = self._run(model, x["tokens"], pool, m, "decode")
        return {"tokens": _greedy(model.logits(hidden)), "lens": lens}, pool

    def _target_verify(self, state, pool: LatentPool, x: Arrays) -> tuple[Arrays, LatentPool]:
        """The last emitted token and its drafts: what is accepted and emitted, and the rows' hidden states."""
        model, rows = self._model(state), self.shapes.num_drafts + 1
        m = md.for_target_verify(x["page_table"], x["lens"], num_tokens=rows, q_lens=rows * x["active"], **self._sizes)
        tokens = jnp.concatenate([x["tokens"][:, None], x["drafts"]], axis=1)
        hidden, pool = self._run(model, tokens.reshape(-1), pool, m, "target_verify")
        targets = _greedy(model.logits(hidden)).reshape(tokens.shape)
        result = accept_greedy(x["drafts"], targets, m.q_lens)
        return {
            "emitted": result.emitted,
            "num_emitted": result.num_emitted,
            "tokens": result.next_tokens,
            "lens": x["lens"] + result.num_emitted,
            "hidden": hidden.reshape(*tokens.shape, -1),
        }, pool

    def _draft_extend(self, state, pool: LatentPool, x: Arrays) -> tuple[Arrays, LatentPool]:
        """The emitted tokens through the draft layer, with the target's hidden states: the first draft."""
        model, rows = self._model(state), self.shapes.num_drafts + 1
        m = md.for_draft_extend(
            x["page_table"], x["lens"], x["num_emitted"] * x["active"], max_q_len=rows, **self._sizes
        )
        hidden = x["hidden"].reshape(-1, self._dim)
        hidden, pool = self._run_draft(model, hidden, x["emitted"].reshape(-1), pool, m, "draft_extend")
        return self._first_draft(model, _last(hidden, m)), pool

    def _draft_decode(self, state, pool: LatentPool, x: Arrays) -> tuple[Arrays, LatentPool]:
        """Draft number ``step + 1`` from draft number ``step``, which stands ``step`` after the cached tokens."""
        model, step = self._model(state), x["step"]
        m = md.for_draft_decode(x["page_table"], x["lens"], step, q_lens=x["active"], **self._sizes)
        tokens = jax.lax.dynamic_index_in_dim(x["drafts"], step, axis=1, keepdims=False)
        hidden, pool = self._run_draft(model, x["hidden"], tokens, pool, m, "draft_decode")
        drafted = _greedy(model.draft_logits(hidden))
        drafts = jax.lax.dynamic_update_slice_in_dim(x["drafts"], drafted[:, None], step + 1, axis=1)
        return {"drafts": drafts, "hidden": hidden}, pool

    def _first_draft(self, model, hidden) -> Arrays:
        drafts = jnp.full((hidden.shape[0], self.shapes.num_drafts), -1, jnp.int32)
        return {"drafts": drafts.at[:, 0].set(_greedy(model.draft_logits(hidden))), "hidden": hidden}

    def _prompt_metadata(self, x: Arrays) -> md.AttentionMetadata:
        rows = x["tokens" if "tokens" in x else "next_tokens"].shape[0]
        return md.for_extend(x["page_table"], x["seq_lens"], x["q_lens"], max_q_len=rows, num_rows=rows, **self._sizes)

    def _rungs(self, **per_request: tuple[int, ...] | None) -> list[Arrays]:
        """Input shapes for each batch: what every pass takes, and arrays [B, ...] (None: a scalar) of its own."""
        return [
            {
                "page_table": _ints(batch, self.shapes.table_width),
                "lens": _ints(batch),
                "active": _ints(batch),
                **{name: self._array(name, batch, tail) for name, tail in per_request.items()},
            }
            for batch in self.shapes.batches
        ]

    def _array(self, name: str, batch: int, tail: tuple[int, ...] | None) -> jax.ShapeDtypeStruct:
        if name == "hidden":
            return jax.ShapeDtypeStruct((batch, *(tail or ())), self._dtype)
        return _ints() if tail is None else _ints(batch, *tail)

    def _prompt_rungs(self, *, drafting: bool = False) -> list[Arrays]:
        hidden = jax.ShapeDtypeStruct
        return [
            {
                "page_table": _ints(batch, self.shapes.table_width),
                "seq_lens": _ints(batch),
                "q_lens": _ints(batch),
                **(
                    {
                        "next_tokens": _ints(rows),
                        "sampled": _ints(batch),
                        "hidden": hidden((rows, self._dim), self._dtype),
                    }
                    if drafting
                    else {"tokens": _ints(rows)}
                ),
            }
            for batch in self.shapes.batches
            for rows in self.shapes.prompt_rows
        ]


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _greedy(logits):
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _last(hidden, metadata: md.AttentionMetadata):
    """The last row of each request; an arbitrary one where it has none."""
    rows = jnp.clip(metadata.q_starts + metadata.q_lens - 1, 0, hidden.shape[0] - 1)
    return hidden[rows]
