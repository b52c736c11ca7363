"""Text from a model, one token at a time.

There is no key/value cache: every token costs a pass over the window. It is meant for a look at a run; for
use, export the model and run it in any engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from farflung.training.inner import precision
from farflung.training.model import Decoder
from farflung.training.out_of_memory import no_room
from farflung.training.tokenizer import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""At the end of a text of bytes: those of a character of which some are still to come, as a rule."""


LEAST_TEMPERATURE = 1e-4
"""Below it, the most likely token is as good as certain, and what is divided by it no number any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is drawn."""

    max_tokens: int = 200
    """Tokens after the prompt; the text may end earlier by itself."""
    temperature: float = 0.8
    """0 takes the most likely token."""
    top_k: int = 40
    """Draw from the k most likely tokens only; 0 draws from all."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 0 or self.temperature < 0 or self.top_k < 0:
            raise ValueError("max_tokens, temperature and top_k must be at least 0")


def sample_text(model: Decoder, tokenizer: Tokenizer, prompt: str, sampling: Sampling) -> str:
    """What the model, of `Replica.outer_parameters()` say, writes after `prompt`; without the prompt."""
    return "".join(sample_pieces(model, tokenizer, prompt, sampling))


def sample_pieces(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    autocast: torch.dtype | None = None,  # precision of the products; None is fp32
) -> Iterator[str]:
    """The same, piece by piece as it is written."""
    generator = torch.Generator().manual_seed(sampling.seed)
    ids = [tokenizer.end_of_text, *tokenizer.encode(prompt).tolist()]
    most = len(ids) + sampling.max_tokens
    said = tokenizer.decode(ids[1:])  # with the prompt before it: many tokenizers drop a space that a text begins with
    while len(ids) < most:
        token = _next_token(model, ids, tokenizer.vocab_size, sampling, generator, autocast)
        if token == tokenizer.end_of_text:
            break
        ids.append(token)
        text = tokenizer.decode(ids[1:])
        if not text.endswith(UNFINISHED):
            yield text[len(said) :]
            said = text
    yield tokenizer.decode(ids[1:])[len(said) :]


@torch.no_grad()
def _next_token(
    model: Decoder,
    ids: list[int],
    vocab_size: int,
    sampling: Sampling,
    generator: torch.Generator,
    autocast: torch.dtype | None,
) -> int:
    device = model.model.embed_tokens.weight.device
    window = torch.tensor([ids[-model.config.seq_len :]], device=device)
    with no_room("a look at the model", device), precision(device, autocast):
        logits = model(window)[0, -1, :vocab_size].float().cpu()  # rows beyond are only padding
    if sampling.temperature < LEAST_TEMPERATURE:
        return int(logits.argmax())
    k = min(sampling.top_k or logits.numel(), logits.numel())
    best, candidates = logits.topk(k)
    weights = (best / sampling.temperature).softmax(0)
    return int(candidates[torch.multinomial(weights, 1, generator=generator)])
