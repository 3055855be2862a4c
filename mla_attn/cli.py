"""Command line: ``mla-attn generate | demo | bench | supports``."""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence

from mla_attn.bench.command import add_arguments
from mla_attn.dispatch import NAMES
from mla_attn.speculative import DraftTree


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 2 for a call that cannot be served."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        print(f"mla-attn: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mla-attn", description="Paged multi-head latent attention in JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="generate text from a DeepSeek checkpoint")
    generate.add_argument("checkpoint", metavar="CHECKPOINT", help="folder with config.json and safetensors")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="a prompt as text")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="a prompt as comma-separated token ids")
    prompt.add_argument("--prompts-file", metavar="F", help="a prompt a line, text or comma-separated ids")
    generate.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="tokens per prompt (default 64)")
    drafting = generate.add_mutually_exclusive_group()
    drafting.add_argument(
        "--speculate", type=int, default=0, metavar="K", help="draft K tokens per step with the MTP layer (default 0)"
    )
    drafting.add_argument(
        "--tree", type=_tree, metavar="W1xW2x...", help="draft a tree: children per node at each depth"
    )
    generate.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="draw tokens at this temperature (default 0: greedy)",
    )
    generate.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="from the K likeliest (default 0: from all)"
    )
    generate.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="from the fewest of probability P (default 1: from all)"
    )
    generate.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the draws of the first prompt (default 0)"
    )
    generate.add_argument("--max-batch", type=int, metavar="B", help="prompts that run at a time (default: all)")
    generate.add_argument("--num-pages", type=int, metavar="N", help="cache pages (default: enough for all prompts)")
    generate.add_argument("--page-size", type=int, default=64, metavar="P", help="tokens per cache page (default 64)")
    generate.add_argument("--prefill-chunk", type=int, metavar="C", help="prompt tokens per pass (default: up to 2048)")
    generate.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of everything (default bfloat16)"
    )
    generate.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    generate.add_argument("--implementation", choices=NAMES, help="of the attention ops (default: the best there is)")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    generate.set_defaults(run=_generate)

    demo = commands.add_parser("demo", help="generate plain, then speculatively, and compare")
    demo.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a checkpoint with an MTP layer")
    demo.set_defaults(run=_demo)

    add_arguments(commands.add_parser("bench", help="time attention ops, whole models or the engine"))

    supports = commands.add_parser("supports", help="print which implementation serves which call")
    supports.set_defaults(run=_supports)
    return parser


def _tree(text: str) -> DraftTree:
    try:
        return DraftTree.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None  # its message, not argparse's own


def _generate(options: argparse.Namespace) -> int:
    import jax.numpy as jnp

    from mla_attn.models import load_checkpoint
    from mla_attn.models.tokenizer import IdTokenizer

    tokenizer = _tokenizer(options)
    prompts = _prompts(options, tokenizer)
    if isinstance(tokenizer, IdTokenizer):
        print(f"mla-attn: warning: no text, token ids alone: {tokenizer.reason}", file=sys.stderr)
    model = load_checkpoint(options.checkpoint, dtype=jnp.dtype(options.dtype))
    engine, parameters = _engine(options, model, prompts)
    engine.warm_up(progress=sys.stderr.isatty())
    show = None if options.json or len(prompts) > 1 else _Printer(tokenizer)
    tokens = {engine.add_request(*request): [] for request in zip(prompts, parameters, strict=True)}
    for output in engine.run():
        tokens[output.request_id] += output.tokens
        if show is not None:
            show(0, output.tokens)
    texts = [tokenizer.decode(new) for new in tokens.values()]
    if options.json:
        texts = [None if isinstance(tokenizer, IdTokenizer) else text for text in texts]
        requests = [
            {"prompt_ids": prompt, "tokens": new, "text": text}
            for prompt, new, text in zip(prompts, tokens.values(), texts, strict=True)
        ]
        print(json.dumps({"requests": requests, "stats": dataclasses.asdict(engine.statistics)}))
        return 0
    if show is None:
        for number, text in enumerate(texts):
            print(f"[{number}] {text}")
    else:
        show.finish()
        print()
    print(_summary(engine.statistics, engine.statistics.step_seconds), file=sys.stderr)
    return 0


def _engine(options: argparse.Namespace, model, prompts: list[list[int]]):
    """An engine for these prompts, and the parameters of each."""
    from mla_attn.engine import Engine, SamplingParams

    for name, least in (
        ("max_new_tokens", 1),
        ("speculate", 0),
        ("page_size", 1),
        ("prefill_chunk", 1),
        ("max_batch", 1),
        ("num_pages", 1),
    ):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {least}")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed {options.seed} must be 0 to 2**32 - 1")
    longest, positions = max(map(len, prompts)), model.max_position_embeddings
    if longest + options.max_new_tokens > positions:
        raise ValueError(
            f"the longest prompt has {longest} tokens and --max-new-tokens is {options.max_new_tokens}: together they "
            f"must be at most max_position_embeddings={positions}"
        )
    tree = options.tree or (DraftTree.chain(options.speculate) if options.speculate else None)
    drafts, page_size = tree.size - 1 if tree else 0, options.page_size
    lengths = [len(prompt) + options.max_new_tokens for prompt in prompts]
    parameters = [
        SamplingParams(
            max_new_tokens=options.max_new_tokens,
            stop_tokens=() if options.ignore_eos else model.eos_token_ids,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=(options.seed + number) % 2**32,  # equal prompts get texts of their own
            speculation=tree,
        )
        for number in range(len(prompts))
    ]
    max_batch = len(prompts) if options.max_batch is None else options.max_batch
    engine = Engine(
        model,
        max_batch=max_batch,
        num_pages=options.num_pages or sum(-(-(n + drafts) // page_size) for n in lengths),
        page_size=page_size,
        max_len=max(lengths),
        speculation=() if tree is None else (tree,),
        prompt_tokens=options.prefill_chunk or min(max(sum(map(len, prompts)), 1), 2048),
        max_waiting=len(prompts),
        batches=(max_batch,),  # one program of each kind: most of a short run is compiling
        implementation=options.implementation,
    )
    for prompt, params in zip(prompts, parameters, strict=True):
        engine.check_request(prompt, params)
    return engine, parameters


def _tokenizer(options: argparse.Namespace):
    """The checkpoint's tokenizer; if there is none to use, one for ids, with which prompts as text are refused."""
    from mla_attn.models.tokenizer import IdTokenizer, load_tokenizer

    try:
        return load_tokenizer(options.checkpoint)
    except (ValueError, ImportError) as error:
        return IdTokenizer(error)


def _prompts(options: argparse.Namespace, tokenizer) -> list[list[int]]:
    if options.prompt is not None:
        return [tokenizer.encode(options.prompt)]
    if options.prompt_ids is not None:
        if not _is_ids(options.prompt_ids):
            raise ValueError(f"--prompt-ids {options.prompt_ids!r} must be comma-separated token ids, as 1,2,3")
        return [_ids(options.prompt_ids)]
    try:
        with open(options.prompts_file, encoding="utf-8-sig") as file:
            lines = [line.rstrip("\n") for line in file if line.strip()]  # splitlines() would cut at form feeds too
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts-file {options.prompts_file!r} must be text in UTF-8: {error}") from None
    if not lines:
        raise ValueError(f"--prompts-file {options.prompts_file!r} holds no prompt, must hold one a line")
    return [_ids(line) if _is_ids(line) else tokenizer.encode(line) for line in lines]


def _is_ids(text: str) -> bool:
    return re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text) is not None


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


class _Printer:
    """Prints the first request's text as it comes, ``prefix`` before it."""

    def __init__(self, tokenizer, *, prefix: str = ""):
        self._stream, self._prefix = tokenizer.stream(), prefix

    def __call__(self, request: int, tokens: list[int]) -> None:
        if request == 0:
            print(self._prefix, self._stream(tokens), sep="", end="", flush=True)
            self._prefix = ""

    def finish(self) -> None:
        """Print what waited for tokens that did not come."""
        print(self._stream.finish(), end="")


def _summary(statistics, seconds: float) -> str:
    s = statistics
    length = "" if s.acceptance_length is None else f", acceptance length {s.acceptance_length:.2f}"
    return (
        f"{s.new_tokens} tokens in {seconds:.2f} s ({s.tokens_per_second:.0f} tokens/s), "
        f"{s.target_steps} target steps{length}; compiling took {s.warm_up_seconds:.1f} s before"
    )


_DEMO_PROMPTS = ("This program is free software", "Permission is hereby granted", "There is NO WARRANTY")
_DEMO_DRAFTS = 3


def _demo(options: argparse.Namespace) -> int:
    import jax
    import jax.numpy as jnp

    from mla_attn.generation import generate
    from mla_attn.models import load_checkpoint
    from mla_attn.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.checkpoint)
    model = load_checkpoint(options.checkpoint, dtype=jnp.float32)
    if not model.can_draft:
        raise ValueError(f"{options.checkpoint}: {model.draft_refusal}; demo needs one")
    prompts = [tokenizer.encode(text) for text in _DEMO_PROMPTS]
    print(f"{options.checkpoint}: {model.config.num_hidden_layers} layers, float32, on {jax.devices()[0].device_kind}")
    results = {}
    for title, drafts in (("plain", 0), (f"speculative, K = {_DEMO_DRAFTS}", _DEMO_DRAFTS)):
        print(f"\n{title}: {len(prompts)} prompts as one batch, the first shown as it comes (programs compile first)")
        show = _Printer(tokenizer, prefix=f"  [0] {_DEMO_PROMPTS[0]}")
        result = generate(
            model,
            prompts,
            max_new_tokens=96,
            num_drafts=drafts,
            on_tokens=show,
            progress=sys.stderr.isatty(),
        )
        show.finish()
        for number, tokens in enumerate(result.tokens):
            if number:
                print(f"\n  [{number}] {_DEMO_PROMPTS[number]}{tokenizer.decode(tokens)}", end="")
        seconds = result.statistics.prefill_seconds + result.statistics.decode_seconds
        print(f"\n{_summary(result.statistics, seconds)}")
        results[title] = result
    plain, speculative = results.values()
    same = plain.tokens == speculative.tokens
    print(f"\nsame tokens from both: {'yes' if same else 'NO'}")
    print(f"target steps: {plain.statistics.target_steps} plain, {speculative.statistics.target_steps} speculative")
    return 0 if same else 1


def _supports(options: argparse.Namespace) -> int:
    from mla_attn.support import support_table

    print(support_table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
