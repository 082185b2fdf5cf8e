"""A sentence that the model goes on with when the engine starts, so that a person sees whether it still speaks.

Broken kernels give garbage that has the right shape and size. What a trained model writes after a plain sentence is
readable whatever the model, so it is shown, and a run stops where it cannot be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tasks.model import Checkpoint
from tasks.report.log import logger
from tasks.tokenize.errors import TokenizeError

PROMPT = "The capital of France is Paris, and that of Italy is"
FEW = 4
"""Fewer tokens than these are never said to repeat."""


@dataclass(frozen=True)
class Continuation:
    """What the model went on with."""

    text: str
    problem: str | None = None
    """Why it cannot be what a trained model writes."""

    def __str__(self) -> str:
        return f"{PROMPT} [...] {self.text}"


class Probe:
    """The prompt in a checkpoint's own tokens; its tokenizer is loaded when it is first needed."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the prompt; none where the checkpoint has no tokenizer, and the probe is left out."""
        from tasks.tokenize.tokenizer import TextTokenizer

        try:
            tokenizer = TextTokenizer(self._checkpoint.path, self._checkpoint.trust_remote_code)
        except TokenizeError as error:
            logger.warning(f"the model is not asked to go on with a sentence: {error}")
            return ()
        self._decode = tokenizer.encoder.decode
        ids = tuple(tokenizer.ids(tokenizer.with_bos(PROMPT)))
        if max(ids) >= self._checkpoint.vocab_size:
            logger.warning("the model is not asked to go on with a sentence: its tokenizer has tokens that it lacks")
            return ()
        return ids

    def judge(self, tokens: Sequence[int]) -> Continuation:
        """Look at the tokens that the model went on with, greedily."""
        text = self._decode(list(tokens))
        return Continuation(text, degenerate(tokens, text))


def degenerate(tokens: Sequence[int], text: str) -> str | None:
    """Why no trained model goes on with these tokens, or None.

    One token again and again; a text without a single letter or digit; or one of which more than half cannot be
    decoded.
    """
    if not tokens:
        return "the model went on with nothing"
    if len(tokens) >= FEW and len(set(tokens)) == 1:
        return f"the model repeats one token, {tokens[0]}"
    if 2 * text.count("\N{REPLACEMENT CHARACTER}") > len(text):
        return "most of what the model writes is no text"
    if not any(character.isalnum() for character in text):
        return "the model writes neither a letter nor a digit"
    return None
