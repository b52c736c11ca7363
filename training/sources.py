"""Opening a data set by its spec, the string that stands in a manifest and on the command line."""

from pathlib import Path

from farflung.training.corpus import python_documents, text_documents
from farflung.training.data import Dataset, text_dataset
from farflung.training.errors import DataError
from farflung.training.shards import open_shards
from farflung.training.stream_spec import StreamSpec
from farflung.training.streamed import open_stream
from farflung.training.tokenizer import Tokenizer

DATA_SPECS = (
    "python, text:PATH, shards:PATH, hf:DATASET[:CONFIG[:SPLIT[:COLUMN]]][?rows=R&samples=N&revision=V&files=F]"
)
"""What a spec may be: the text of this Python, a text file or folder, token shards, a data set of the hub."""


def open_dataset(spec: str, tokenizer: Tokenizer, seq_len: int) -> Dataset:
    """The data set that `spec` names, see DATA_SPECS. Raises DataError, whose message names the remedy."""
    kind, _, rest = spec.partition(":")
    match kind:
        case "python" if not rest:
            return text_dataset(python_documents(), tokenizer, seq_len)
        case "text" if rest:
            return text_dataset(text_documents(Path(rest)), tokenizer, seq_len)
        case "shards" if rest:
            return open_shards(Path(rest), tokenizer, seq_len)
        case "hf" if rest:
            return open_stream(StreamSpec.parse(rest), tokenizer, seq_len)
    raise DataError(f"data {spec!r} is none of {DATA_SPECS}")


def lies_here(spec: str) -> bool:
    """Whether `spec` names a path, so that the same data may lie elsewhere on another machine."""
    kind, _, rest = spec.partition(":")
    if kind == "hf":
        try:
            return StreamSpec.parse(rest).is_local
        except DataError:
            return False
    return kind in ("text", "shards")
