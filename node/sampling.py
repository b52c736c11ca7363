"""`farflung sample`: what the model that this machine has on its disk writes after a prompt."""

from collections.abc import Iterator

import torch

from farflung.node.kept_model import kept_model, runtime_beside
from farflung.node.options import SampleOptions
from farflung.node.paths import resolve_paths
from farflung.node.recipe import swarm_tokenizer
from farflung.node.swarmfiles import tokenizer_file
from farflung.protocol.errors import ConfigError
from farflung.training.flat import Layout, unflatten
from farflung.training.model import Decoder
from farflung.training.out_of_memory import no_room
from farflung.training.sample import Sampling, sample_pieces


def sample_swarm(options: SampleOptions) -> tuple[int, Iterator[str]]:
    """The version of the outer parameters, and the text piece by piece. Blocks. Raises ConfigError, LocalError, NotEnoughMemory."""
    try:
        options.prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("--prompt is no UTF-8 text") from error
    swarm = resolve_paths(options.home).find_swarm(options.swarm)
    kept = kept_model(swarm)
    manifest = kept.recipe.manifest
    runtime = runtime_beside(swarm, options.device, options.dtype)
    device = torch.device(runtime.device)
    with no_room("the model", device):
        model = Decoder(kept.recipe.model, seed=None).to(device)
    unflatten(Layout(model), kept.whole(), list(model.parameters()))
    sampling = Sampling(
        max_tokens=options.max_tokens, temperature=options.temperature, top_k=options.top_k, seed=options.seed
    )
    tokenizer = swarm_tokenizer(manifest, tokenizer_file(swarm))
    return kept.version, sample_pieces(model, tokenizer, options.prompt, sampling, runtime.autocast)
