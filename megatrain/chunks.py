"""Where the head and the loss of a micro-batch are cut, so that only the logits of one chunk exist at a time.

Scope: the length of a chunk, from the setting and the shape of a micro-batch; no torch.
Not here: running the head on a chunk (`stream.py`, `loss.py`), what it costs (`profile.py`, `catalog/estimate.py`).
"""


def chunk_length(rows: int, seq_len: int, loss_chunk: int | None) -> int:
    """Positions of each sequence in one chunk: the same ones of all `rows` sequences, so rows x length tokens.

    loss_chunk: tokens whose logits may exist at a time. None, or as many as there are: the micro-batch is one chunk. A
    chunk has at least one position, so fewer tokens than sequences mean one of each. The last chunk may be shorter.

    >>> chunk_length(4, 2048, 1024), chunk_length(4, 2048, 3), chunk_length(4, 2048, None)
    (256, 1, 2048)
    """
    return seq_len if loss_chunk is None else min(seq_len, max(1, loss_chunk // rows))
