"""The options of every command, and the checks of their combinations."""

import argparse
import functools
import math
from typing import Any

from mla_attn.bench import output
from mla_attn.bench.configs import CONFIGS
from mla_attn.bench.ops import shapes
from mla_attn.cli.options import (
    DRAFT,
    FOLDER,
    INT32_MAX,
    MOST_BATCH,
    MOST_DEVICES,
    MOST_DRAFTS,
    MOST_PAGE_SIZE,
    MOST_SEED,
    TREE,
    Kind,
    Parser,
    integer,
    number,
    several,
    words,
)
from mla_attn.names import DENSE_GATHER, DTYPES, IMPLEMENTATIONS, KV_DTYPES

_PAGE_SIZE = integer(1, MOST_PAGE_SIZE)
_NUM_PAGES = integer(1, INT32_MAX)
_SEED = integer(0, MOST_SEED)
_TEMPERATURE = number(0, 1e30)
_THRESHOLD = number(0, 1e30, above=True)
_MOST_TOKENS = 2**20  # tokens of a request in a trace
_MOST_TRACE = 10**8  # tokens of all requests in a trace, which is generated as a whole


@functools.cache
def make_parser() -> Parser:
    """The parser of all commands. It sets ``run`` to a module's name, and ``check`` to a function of the options."""
    parser = Parser(prog="mla-attn", description="Paged attention in JAX, latent and grouped-query.")
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    commands = parser.add_commands("COMMAND")

    _generate(commands.add_parser("generate", help="generate text from a checkpoint"))
    _calibrate(commands.add_parser("calibrate", help="measure the scales of a float8 cache on prompts"))
    _warm_up(commands.add_parser("warm-up", help="compile an engine's programs and keep them for other processes"))
    demo = commands.add_parser("demo", help="generate plain, with an MTP layer also speculatively, and compare")
    demo.add(
        "checkpoints",
        FOLDER,
        nargs="+",
        metavar="CHECKPOINT",
        help="folder of a checkpoint, or several; those with an MTP layer also generate speculatively",
    )
    _runs(demo, "mla_attn.cli.demo")

    bench = commands.add_parser("bench", help="time attention ops, whole models or the engine")
    kinds = bench.add_commands("KIND")
    _bench_ops(kinds.add_parser("ops", help="check and time attention implementations, call by call"))
    _bench_roofline(kinds.add_parser("roofline", help="draw the picture of a report of `bench ops`"))
    _bench_model(kinds.add_parser("model", help="time decode steps of a whole model of random weights"))
    _bench_serve(kinds.add_parser("serve", help="replay a trace of requests on the engine"))
    _bench_host(kinds.add_parser("host", help="time the engine's host work alone"))
    _bench_start(kinds.add_parser("start", help="time lowering and compiling, until an engine's first token"))
    _bench_rungs(kinds.add_parser("rungs", help="time passes in programs for more requests or rows than there are"))

    _runs(commands.add_parser("supports", help="print which calls are supported"), "mla_attn.cli.supports")
    return parser


def _runs(parser: Parser, module: str, check: Any = lambda options: None) -> None:
    parser.set_defaults(run=module, check=check)


class _Version(argparse.Action):
    def __init__(self, **options: Any):
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import mla_attn

        print(f"mla-attn {mla_attn.__version__}")
        parser.exit()


def _generate(parser: Parser) -> None:
    add = parser.add
    add("checkpoint", FOLDER, metavar="CHECKPOINT", help="folder with config.json and safetensors")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="a prompt as text")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="a prompt as comma-separated token ids")
    prompt.add_argument(
        "--prompts-file", metavar="F", help="one prompt per line: text, or ids with commas, as 1,2 or 42,; - is stdin"
    )
    add("--max-new-tokens", integer(1, INT32_MAX), default=64, metavar="N", help="most tokens per prompt (default 64)")
    _drafts(parser)
    add("--temperature", _TEMPERATURE, default=0.0, metavar="T", help="sample at this temperature (default 0: greedy)")
    add("--top-k", integer(0, INT32_MAX), default=0, metavar="K", help="keep the K likeliest tokens (default 0: all)")
    top_p = number(0, 1, above=True)
    add("--top-p", top_p, default=1.0, metavar="P", help="keep tokens of total probability P (default 1: all)")
    add("--seed", _SEED, metavar="S", help="random seed of the first prompt (default: a new one)")
    add("--max-batch", integer(1, MOST_BATCH), metavar="B", help="most prompts that run at once (default: all)")
    add("--num-pages", _NUM_PAGES, metavar="N", help="cache pages (default: enough for all prompts)")
    add("--page-size", _PAGE_SIZE, default=64, metavar="P", help="tokens per cache page (default 64)")
    add("--prefill-chunk", integer(1, INT32_MAX), metavar="C", help="most prompt tokens per pass (default 2048)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="dtype of weights, activations and cache (default bfloat16)"
    )
    add("--skip-threshold", _THRESHOLD, metavar="F", help="leave out keys of about this share of the attention at most")
    _stored(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at end tokens")
    _implementation(parser)
    _cache_dir(parser)
    _devices(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    _runs(parser, "mla_attn.cli.generate", _check_generate)


def _drafts(parser: Parser) -> None:
    add, speculate = parser.add, integer(0, MOST_DRAFTS)
    add("--speculate", speculate, default=0, metavar="K", help="draft K tokens per step (default 0)")
    add("--tree", TREE, metavar="W1xW2x...", help="draft a tree: children per node at each depth")
    add(
        "--draft",
        DRAFT,
        metavar="CHECKPOINT",
        help="a smaller checkpoint that drafts, or ngram:N to draft from the text itself by its last N tokens, as "
        "ngram:3 (default: the MTP layer)",
    )


def _stored(parser: Parser) -> None:
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help="format of the cache (default: --dtype)")
    parser.add_argument(
        "--kv-scales",
        metavar="FILE",
        help="JSON with the scales of a float8 cache, as `calibrate` writes it (default: the checkpoint's, or 1)",
    )
    parser.add_argument(
        "--draft-kv-dtype",
        choices=KV_DTYPES,
        help="format of the cache of the MTP layer or of the --draft model (default: --kv-dtype)",
    )


def _implementation(parser: Parser) -> None:
    parser.add_argument(
        "--implementation", choices=IMPLEMENTATIONS, help="attention implementation (default: chosen for each call)"
    )


def _devices(parser: Parser) -> None:
    add, devices = parser.add, integer(1, MOST_DEVICES)
    add("--tensor-parallel", devices, default=1, metavar="N", help="devices that share the heads (default 1)")
    add("--context-parallel", devices, default=1, metavar="N", help="devices that share every context (default 1)")
    add(
        "--expert-parallel",
        devices,
        default=1,
        metavar="N",
        help="of these devices, those that share the experts (default 1: experts are shared by width)",
    )


def _check_devices(options: argparse.Namespace) -> None:
    tensor, context = options.tensor_parallel, options.context_parallel
    if options.expert_parallel not in (allowed := {1, tensor, context, tensor * context}):
        raise ValueError(
            f"--expert-parallel {options.expert_parallel} must be one of {', '.join(map(str, sorted(allowed)))}, as "
            f"--tensor-parallel is {tensor} and --context-parallel {context}"
        )
    if options.page_size % context:
        raise ValueError(f"--page-size {options.page_size} must be a multiple of --context-parallel {context}")


def _cache_dir(parser: Parser) -> None:
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help='folder that keeps programs, "" for none (default: MLA_ATTN_CACHE_DIR, or the user\'s cache folder)',
    )


def _calibrate(parser: Parser) -> None:
    parser.description = (
        "Run prompts through a checkpoint, and write the scales that a float8 cache needs for them: for each layer the "
        "largest number of its cache rows, divided by 448. `generate --kv-scales FILE` reads the file."
    )
    add = parser.add
    add("checkpoint", FOLDER, metavar="CHECKPOINT", help="folder with config.json and safetensors")
    parser.add_argument("--prompts-file", required=True, metavar="F", help="prompts, as of `generate`; - is stdin")
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write, JSON")
    rows = integer(1, _MOST_TOKENS)
    add("--prefill-chunk", rows, default=512, metavar="C", help="most prompt tokens per pass (default 512)")
    add("--page-size", _PAGE_SIZE, default=64, metavar="P", help="tokens per cache page (default 64)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the model (default bfloat16)")
    _implementation(parser)
    _runs(parser, "mla_attn.cli.calibrate", _check_calibrate)


def _check_calibrate(options: argparse.Namespace) -> None:
    output.check_file("--output", options.output)


def _warm_up(parser: Parser) -> None:
    parser.description = (
        "Compile the programs of an engine with these sizes, as Engine.from_checkpoint(CHECKPOINT, ...) would, and "
        "keep them: an engine with the same sizes then starts quickly in any process on such a device."
    )
    parser.add("checkpoint", FOLDER, metavar="CHECKPOINT", help="folder with config.json and safetensors")
    _engine_sizes(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="of weights, activations and cache (default: the checkpoint's)")
    _runs(parser, "mla_attn.cli.warm_up", _check_engine)


def _engine_sizes(parser: Parser) -> None:
    """The arguments of an engine's constructor that decide its programs, with its defaults."""
    add = parser.add
    add("--max-batch", integer(1, MOST_BATCH), default=8, metavar="B", help="most running requests (default 8)")
    add("--max-len", integer(1, INT32_MAX), metavar="N", help="most tokens of a request (default: as many as fit)")
    add("--num-pages", _NUM_PAGES, metavar="N", help="cache pages (default: as many as fit)")
    add("--page-size", _PAGE_SIZE, default=64, metavar="P", help="tokens per cache page (default 64)")
    rows = integer(1, _MOST_TOKENS)
    add("--prompt-tokens", rows, default=512, metavar="N", help="most prompt tokens per step (default 512)")
    _drafts(parser)
    _stored(parser)
    _implementation(parser)
    _cache_dir(parser)


def _check_drafts(options: argparse.Namespace) -> None:
    if options.tree and options.speculate not in (0, (0,)):
        raise ValueError("--tree is not allowed with --speculate: a chain is the tree 1x1x...")
    if getattr(options, "draft", None) is not None and not (options.tree or options.speculate):
        raise ValueError("--draft needs --speculate or --tree")


def _check_engine(options: argparse.Namespace) -> None:
    _check_drafts(options)
    if options.draft_kv_dtype is not None and (
        isinstance(options.draft, int) or not (options.tree or options.speculate)
    ):
        raise ValueError("--draft-kv-dtype needs --speculate or --tree, with drafts of a model")
    formats = options.kv_dtype, options.draft_kv_dtype
    if options.kv_scales is not None and not any((name or "").startswith("float8") for name in formats):
        raise ValueError("--kv-scales needs --kv-dtype with float8")


def _check_generate(options: argparse.Namespace) -> None:
    _check_engine(options)
    _check_devices(options)


def _bench_ops(parser: Parser) -> None:
    parser.description = f"Check and time implementations of an attention op. A shape is {shapes.GRAMMAR}"
    add = parser.add
    parser.add_argument("--op", choices=("mla", "gqa"), default="mla", help="latent or grouped-query (default mla)")
    shape, lengths = Kind(shapes.parse_shape, None), Kind(_lengths, None)
    add("--shape", shape, action="append", metavar="SHAPE", help="a shape; may be repeated")
    parser.add_argument("--set", choices=shapes.SETS, help="named shapes (default: cpu on a CPU, hopper elsewhere)")
    add(
        "--kv-lens", lengths, metavar="LENGTHS", help="lengths of one more shape, as 32768,63*16, with --heads, --q-len"
    )
    heads, q_len = integer(1, shapes.MOST_HEADS), integer(1, shapes.MOST_QUERIES)
    add("--heads", heads, default=128, metavar="H", help="query heads with --kv-lens (default 128)")
    add("--kv-heads", heads, default=8, metavar="K", help="key and value heads with --kv-lens and --op gqa (default 8)")
    add("--q-len", q_len, default=1, metavar="S", help="query tokens with --kv-lens (default 1)")
    parser.add_argument("--list", action=_List, help="print the named shapes and run nothing")
    add("--page-size", _PAGE_SIZE, default=64, metavar="P", help="tokens per page (default 64)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of all arrays (default bfloat16)")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help="format of the cache (default: --dtype)")
    add("--latent", _LATENT, default=(512, 64), metavar="R+E", help="MLA's latent and rope channels (default 512+64)")
    add("--head-dim", integer(1, 65536), default=128, metavar="D", help="channels of GQA's heads (default 128)")
    add(
        "--implementation",
        words(*IMPLEMENTATIONS, DENSE_GATHER),
        metavar="A,B",
        help=f"some of {', '.join(IMPLEMENTATIONS)}, {DENSE_GATHER} (default: all that are chosen automatically, and "
        f"{DENSE_GATHER}: a gather of the whole padded table, then one softmax)",
    )
    repeats = integer(1, 1000)
    add("--repeats", repeats, default=7, metavar="N", help="timed chains; their median is reported (default 7)")
    parser.add_argument(
        "--unroll",
        action="store_true",
        help="unroll the chain of calls: a loop adds about 15 us per call to a GPU's wall time",
    )
    add("--seed", _SEED, metavar="S", help="random seed of all data (default: a new one)")
    parser.add_argument(
        "--check",
        dest="check_alone",
        action="store_true",
        help="check results and time nothing: print versions, and for each shape pass or the first wrong row (with "
        "--set triton, of both ops)",
    )
    output.add_arguments(parser, picture="a roofline picture")
    _runs(parser, "mla_attn.bench.ops.command", _check_bench_ops)


def _parse_latent(text: str) -> tuple[int, int]:
    rank, _, rope = text.partition("+")
    return integer(1, 65536).parse(rank), integer(0, 65536).parse(rope)


_LATENT = Kind(_parse_latent, "latent channels, 1 to 65536, and rope channels, 0 to 65536, as 512+64")


def _lengths(text: str) -> str:
    shapes.parse_lengths(text)
    return text.replace(",", "+")


class _List(argparse.Action):
    def __init__(self, **options: Any):
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(shapes.GRAMMAR)
        for op, sets in (("mla", shapes.SETS), ("gqa", shapes.GQA_SETS)):
            for name, texts in sets.items():
                print(f"\n{name} ({op}):", *texts, sep="\n  ")
        parser.exit()


def _check_bench_ops(options: argparse.Namespace) -> None:
    if options.kv_lens:
        requests = len(shapes.parse_lengths(options.kv_lens))
        heads = options.heads if options.op == "mla" else f"{options.heads}/{options.kv_heads}"
        text = f"{requests}x{heads}x{options.q_len}x{options.kv_lens}"
        options.shape = [*(options.shape or ()), shapes.parse_shape(text)]
    for shape in options.shape or ():
        if (shape.kv_heads is None) != (options.op == "mla"):
            allowed = "without key and value heads" if options.op == "mla" else "with them, as 8x32/8x1x4096"
            raise ValueError(f"--shape {shape.name} with --op {options.op}: must be {allowed}")
    if options.kv_dtype is not None and options.kv_dtype.endswith(":blocks"):
        if options.op == "gqa":
            raise ValueError(f"--kv-dtype {options.kv_dtype} with --op gqa: it stores latent rows only")
        if options.latent[0] % 128:
            raise ValueError(f"--kv-dtype {options.kv_dtype}: latent channels of --latent must be a multiple of 128")
    output.check_files(options)


def _bench_roofline(parser: Parser) -> None:
    parser.description = "Draw the roofline picture of a report that `mla-attn bench ops --json FILE` wrote."
    parser.add_argument("report", metavar="REPORT", help="the JSON file")
    parser.add_argument("plot", metavar="PICTURE", help="the file to draw (needs matplotlib)")
    parser.set_defaults(json=None)
    _runs(parser, "mla_attn.bench.ops.roofline", functools.partial(output.check_files, picture="PICTURE"))


def _bench_model(parser: Parser) -> None:
    parser.description = "Time decode steps of a whole model with random bfloat16 weights and a real model's sizes."
    add = parser.add
    parser.add_argument("model", choices=CONFIGS, help="model whose sizes are used")
    batches = several(integer(1, MOST_BATCH))
    add("--batch", batches, default=(1, 16, 64), metavar="B,B", help="requests per step (default 1,16,64)")
    kv_len = integer(1, min(config["max_position_embeddings"] for config in CONFIGS.values()))
    add("--kv-len", kv_len, default=4096, metavar="N", help="tokens of each request (default 4096)")
    add("--page-size", _PAGE_SIZE, default=64, metavar="P", help="tokens per page (default 64)")
    _implementation(parser)
    output.add_arguments(parser, picture=None)
    _runs(parser, "mla_attn.bench.model", output.check_files)


def _bench_serve(parser: Parser) -> None:
    parser.description = "Replay a synthetic trace of requests on the engine: throughput, latencies, a picture."
    add, tokens = parser.add, integer(1, _MOST_TOKENS)
    add(
        "checkpoint",
        _CHECKPOINT,
        metavar="CHECKPOINT",
        help=f"a folder, or one of {', '.join(CONFIGS)} for random weights",
    )
    add(
        "--requests",
        integer(1, 100_000),
        metavar="N",
        help="number of requests (default 64; with several batch sizes 4 times each, at least 8)",
    )
    rate = number(1e-3, math.inf)
    add("--rate", rate, default=math.inf, metavar="R", help="arrivals per second, Poisson (default: all at once)")
    add("--prompt-tokens", tokens, default=256, metavar="MEAN", help="mean prompt length without prefix (default 256)")
    add("--new-tokens", tokens, default=64, metavar="MEAN", help="mean generated tokens (default 64)")
    spread = number(0, 10)
    add("--spread", spread, default=0.5, metavar="X", help="standard deviation of log lengths (default 0.5)")
    prefix = integer(0, _MOST_TOKENS)
    add("--shared-prefix", prefix, default=0, metavar="TOKENS", help="length of 4 common prefixes (default 0: none)")
    share = number(0, 1)
    add("--shared-share", share, default=0.5, metavar="0..1", help="share of requests with one (default 0.5)")
    long = integer(0, _MOST_TOKENS)
    add("--long-prompt", long, default=0, metavar="TOKENS", help="prompt length of one more request after all others")
    add(
        "--max-batch",
        several(integer(1, MOST_BATCH)),
        default=(8,),
        metavar="B,B",
        help="most requests that run at the same time (default 8); several sizes are replayed one after the other, and "
        "passes are compiled for these sizes only",
    )
    add("--num-pages", _NUM_PAGES, metavar="N", help="pages of the cache (default: --max-batch requests of --max-len)")
    add("--max-len", integer(1, INT32_MAX), metavar="N", help="most tokens of a request (default: 4 times the mean)")
    add("--step-prompt-tokens", tokens, default=512, metavar="N", help="most prompt tokens per step (default 512)")
    add("--temperature", _TEMPERATURE, default=0.0, metavar="T", help="sampling temperature (default 0: greedy)")
    drafts = several(integer(0, MOST_DRAFTS))
    add(
        "--speculate",
        drafts,
        default=(0,),
        metavar="K,K",
        help="draft K tokens per step (default 0); several, as 0,3, are replayed in turn. Prompts are random ids, "
        "whose continuations are hard to draft: see --acceptance",
    )
    add("--tree", TREE, metavar="W1xW2x...", help="draft a tree: children per node at each depth")
    rates = several(number(0, 1))
    add("--acceptance", rates, metavar="X,X", help="simulate that each draft is accepted with this probability, 0 to 1")
    add("--page-size", _PAGE_SIZE, default=64, metavar="P", help="tokens per page (default 64)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of all arrays (default bfloat16)")
    _implementation(parser)
    _cache_dir(parser)
    add("--seed", integer(0, INT32_MAX), metavar="S", help="random seed of trace and sampling (default: a new one)")
    output.add_arguments(parser, picture="latencies, or throughput by batch size")
    _runs(parser, "mla_attn.bench.serve.command", _check_bench_serve)


def _checkpoint(text: str) -> str:
    return text if text in CONFIGS else FOLDER.parse(text)


_CHECKPOINT = Kind(_checkpoint, f"a folder or one of {', '.join(CONFIGS)}")


def _check_bench_serve(options: argparse.Namespace) -> None:
    _check_drafts(options)
    if options.acceptance is not None and not (options.tree or any(options.speculate)):
        raise ValueError("--acceptance needs --speculate or --tree")
    mean = options.shared_prefix + options.prompt_tokens + options.new_tokens
    most = INT32_MAX if options.num_pages is None else options.num_pages * options.page_size
    if options.max_len is not None and options.max_len > most:
        raise ValueError(f"--max-len {options.max_len} must be at most {most}, what --num-pages hold")
    if mean > (options.max_len or most):
        raise ValueError(
            f"--shared-prefix {options.shared_prefix}, --prompt-tokens {options.prompt_tokens} and --new-tokens "
            f"{options.new_tokens} are {mean} together, must be at most {options.max_len or most}, what "
            f"{'--max-len allows' if options.max_len else '--num-pages hold'}"
        )
    if options.long_prompt and options.long_prompt + options.new_tokens > (options.max_len or most):
        raise ValueError(
            f"--long-prompt {options.long_prompt} and --new-tokens {options.new_tokens} are "
            f"{options.long_prompt + options.new_tokens} together, must be at most {options.max_len or most}, what "
            f"{'--max-len allows' if options.max_len else '--num-pages hold'}"
        )
    requests = options.requests or max(64, 4 * max(options.max_batch))
    if requests * mean > _MOST_TRACE:
        raise ValueError(
            f"{requests} requests of {mean} tokens, new ones included, must be at most {_MOST_TRACE} tokens together"
        )
    output.check_files(options)


def _bench_host(parser: Parser) -> None:
    parser.description = "Time the engine's host work: CPU time of this thread in steps whose passes do nothing."
    usual = (1024, 8192, 32768, 131072)
    numbers = ",".join(map(str, usual))
    prompts = several(integer(1, _MOST_TOKENS))
    parser.add("--prompt-tokens", prompts, default=usual, metavar="N,N", help=f"prompt lengths (default {numbers})")
    output.add_arguments(parser, picture="host ms per step by prompt length")
    _runs(parser, "mla_attn.bench.serve.host", output.check_files)


def _bench_start(parser: Parser) -> None:
    parser.description = (
        "Time an engine's start in a fresh process: lowering, compiling, its first token and its last program. Run it "
        "twice with one --cache-dir to time a start from the folder. With `kernels`, time single calls of the kernels "
        "instead, and of JAX's own attention for Hopper."
    )
    what = Kind(_kernels_or_checkpoint, f"kernels, a folder or one of {', '.join(CONFIGS)}")
    parser.add("what", what, metavar="WHAT", help=f"kernels, a folder, or one of {', '.join(CONFIGS)}: random weights")
    _engine_sizes(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and cache (default bfloat16)")
    output.add_arguments(parser, picture=None)
    _runs(parser, "mla_attn.bench.start", _check_bench_start)


def _kernels_or_checkpoint(text: str) -> str:
    return text if text == "kernels" else _checkpoint(text)


def _check_bench_start(options: argparse.Namespace) -> None:
    _check_engine(options)
    output.check_files(options)


def _bench_rungs(parser: Parser) -> None:
    parser.description = (
        "Time passes of a whole model with random bfloat16 weights in the programs for their own size and for larger "
        "ones: what leaving a batch size, or a number of rows, out of an engine's ladder costs."
    )
    add = parser.add
    parser.add_argument("model", choices=CONFIGS, help="model whose sizes are used")
    batches, rows = several(integer(1, MOST_BATCH)), several(integer(1, 65536))
    usual = (1, 2, 4, 8, 16, 32, 64)
    numbers = ",".join(map(str, usual))
    add("--batch", batches, default=usual, metavar="B,B", help=f"requests per decode step (default {numbers})")
    usual = (64, 128, 256, 512)
    numbers = ",".join(map(str, usual))
    add("--rows", rows, default=usual, metavar="T,T", help=f"prompt rows per pass (default {numbers})")
    kv_len = integer(1, min(config["max_position_embeddings"] for config in CONFIGS.values()))
    add("--kv-len", kv_len, default=1024, metavar="N", help="tokens of each request (default 1024)")
    add("--page-size", _PAGE_SIZE, default=64, metavar="P", help="tokens per page (default 64)")
    _implementation(parser)
    output.add_arguments(parser, picture=None)
    _runs(parser, "mla_attn.bench.rungs", output.check_files)
