"""EleutherAI's lm-evaluation-harness over Holdfast's models: its tasks and metrics, our forward passes and generation.

Importing this module needs lm_eval.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from holdfast.evaluation.scoring import Pair, score, windows
from holdfast.generation.engine import stream
from holdfast.generation.loading import LoadedModel
from holdfast.generation.requests import GenerationRequest
from holdfast.generation.sampling import Sampling, sequence_seed
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.progress import progress
from holdfast.tokenizers import Tokenizer

# lm-evaluation-harness uses the same number where a task gives none.
MAX_GENERATED_TOKENS = 256
# Texts that are generated at the same time; each takes cache for its prompt and its longest text.
TEXTS_AT_ONCE = 8
SEED = 1234


def evaluate_tasks(
    loaded: LoadedModel,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    include_path: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """The metrics of each task by name, as lm-evaluation-harness reports them."""
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    for task in tasks:
        if not manager.match_tasks([task]):
            raise UsageError(
                f"lm-evaluation-harness has no task '{task}'; lm_eval ls tasks lists them, --include-path adds your own"
            )
    try:
        results = simple_evaluate(
            model=HarnessModel(loaded), tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, task_manager=manager
        )
    except OSError as error:  # no network, no such file
        raise HoldfastError(f"lm-evaluation-harness cannot read the data of {', '.join(tasks)}: {error}") from error
    found: dict[str, dict[str, Any]] = results["results"]
    return found


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A loaded model as lm-evaluation-harness calls it, with the same tokens as its own `hf` model.

    Texts get the special tokens that the tokenizer adds around a text, as in preprocessing.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self._loaded = loaded
        self._plain = Tokenizer(replace(loaded.tokenizer.recipe, special_tokens=False))

    @property
    def eot_token_id(self) -> int:
        return self._loaded.tokenizer.eod or 0

    @property
    def prefix_token_id(self) -> int:
        begin = self._loaded.tokenizer.recipe.bos
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int:
        return self._loaded.max_positions

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:  # a text that begins with the token gets no second one
            add_special_tokens = not string.startswith(self._plain.decode([self.prefix_token_id]))
        return (self._loaded.tokenizer if add_special_tokens else self._plain).encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [Pair(context, continuation) for _, context, continuation in requests]
        with progress("scoring", len(pairs), "continuations") as bar:
            return [(result.logprob, result.greedy) for result in score(self._loaded, pairs, bar.advance)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        totals = []
        with progress("scoring", len(requests), "documents") as bar:
            for request in requests:
                pairs = list(windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length))
                totals.append(sum(result.logprob for result in score(self._loaded, pairs)))
                bar.advance()
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        wanted = [self._request(number, *request.args) for number, request in enumerate(requests)]
        texts = [""] * len(wanted)
        with progress("generating", len(wanted), "texts") as bar:
            for first in range(0, len(wanted), TEXTS_AT_ONCE):
                for number, emission in stream(self._loaded, wanted[first : first + TEXTS_AT_ONCE]):
                    texts[first + number] += emission.text
                    if emission.finish_reason is not None:
                        bar.advance()
        return texts

    def _request(self, number: int, context: str, settings: dict[str, Any]) -> GenerationRequest:
        """A context that leaves no room for the text loses its beginning. The seeds differ, since a task may repeat a request."""
        sampled = settings.get("do_sample", settings.get("temperature", 0) > 0)
        limit = min(int(settings.get("max_gen_toks", MAX_GENERATED_TOKENS)), self.max_length - 1)
        stops = settings.get("until") or []
        sampling = Sampling(
            settings.get("temperature", 1.0) if sampled else 0.0, settings.get("top_k", 0), settings.get("top_p", 1.0)
        )
        return GenerationRequest(
            tuple(self.tok_encode(context)[-(self.max_length - limit) :]),
            limit,
            sampling,
            seed=sequence_seed(SEED, number, 0),
            stop=(stops,) if isinstance(stops, str) else tuple(stop for stop in stops if stop),
        )
