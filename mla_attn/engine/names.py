"""Names of arguments in other serving engines, which error messages translate to ours."""

import difflib
import functools
import inspect
from collections.abc import Callable

_MEANT = {
    "block_size": "page_size",
    "enable_prefix_caching": "prefix_cache",
    "eos_token_id": "stop_token_ids",
    "gpu_memory_utilization": "memory_fraction",
    "max_length": "max_new_tokens",
    "max_model_len": "max_len",
    "max_num_batched_tokens": "prompt_tokens",
    "max_num_seqs": "max_batch",
    "max_seq_len": "max_len",
    "max_tokens": "max_new_tokens",
    "mem_fraction_static": "memory_fraction",
    "num_blocks": "num_pages",
    "num_gpu_blocks": "num_pages",
    "num_speculative_tokens": "speculation",
    "random_seed": "seed",
    "sampling_params": "params",
    "stop": "stop_token_ids",
    "stop_ids": "stop_token_ids",
    "stop_tokens": "stop_token_ids",
    "temp": "temperature",
    "use_tqdm": "progress",
}


def with_hints[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Wraps a function so that its TypeError for an unknown argument suggests the right name."""
    name = function.__qualname__.removesuffix(".__init__")
    known = [argument for argument in inspect.signature(function).parameters if argument != "self"]

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        for wrong in options.keys() - set(known):
            meant = _MEANT.get(wrong)
            likely = [meant] if meant in known else difflib.get_close_matches(wrong, known, 1)
            hint = f": it is {likely[0]} here" if likely else f", must be one of {', '.join(known)}"
            raise TypeError(f"{name}() has no argument {wrong!r}{hint}")
        return function(*arguments, **options)

    return call
