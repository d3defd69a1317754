"""Loss of an answer whose document is unknown: RAG's two ways of summing over the retrieved documents."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.model import Model

Form = Literal["token", "sequence"]


def marginal_nll(
    log_probs: Float[Tensor, "b k s"],
    scores: Float[Tensor, "b k"],
    form: Form = "token",
    counts: Bool[Tensor, "b s"] | None = None,
) -> Float[Tensor, " b"]:
    """Returns -log p(y | x) in nats, marginalised over the retrieved documents z. Lewis et al. 2020, 2005.11401,
    section 2.1.

        p(z | x) = softmax_z(scores)
        token      p(y | x) = prod_t sum_z p(z | x) p(y_t | x, z, y_<t)
        sequence   p(y | x) = sum_z p(z | x) prod_t p(y_t | x, z, y_<t)

    log_probs: log p(y_t | x, z, y_<t) for each of k documents. `counts` is the mask of the s tokens that belong to the
    answer, by default all. Gradients reach the scores, and through them the encoder of the question.
    """
    if form not in ("token", "sequence"):
        raise RequestError(code="unknown", field="form", value=form, expected="token or sequence")
    log_probs, priors = log_probs.float(), scores.float().log_softmax(-1)
    if counts is not None:
        log_probs = log_probs.where(counts[:, None], 0)
    if form == "sequence":
        return -torch.logsumexp(log_probs.sum(-1) + priors, -1)
    tokens = torch.logsumexp(log_probs + priors[..., None], 1)  # log 1 for tokens that do not count
    return -tokens.sum(-1)


def rag_loss(
    model: Model,
    tokens: Int[Tensor, "b k s"],
    targets: Int[Tensor, "b k s"],
    scores: Float[Tensor, "b k"],
    form: Form = "token",
    documents: Int[Tensor, "b k s"] | None = None,
    source: Int[Tensor, "b k t"] | None = None,
    source_documents: Int[Tensor, "b k t"] | None = None,
) -> Float[Tensor, " b"]:
    """Returns the `marginal_nll` of answers by a model that reads each of k retrieved documents separately.

    scores: similarity of each document to its question, such as the product of their vectors. Targets of -100 do not
    count; the others are the answer, the same tokens in the same order for each document of a row. A decoder reads
    document, question and answer as `tokens`: the answer may start at another position for each document, and
    `documents` is 0 at padding. A model with an encoder reads document and question as `source`.

    >>> scores = question @ passages.mT        # (b, k)
    >>> rag_loss(model, tokens, targets, scores, form="sequence").mean().backward()
    """
    b, k, s = tokens.shape
    shapes = {"targets": targets.shape, "scores": (*scores.shape, s), "documents": (b, k, s)}
    if documents is not None:
        shapes["documents"] = documents.shape
    for name, shape in shapes.items():
        if shape != (b, k, s):
            raise RequestError(
                f"{name} have the shape {tuple(shape)} and the tokens {(b, k, s)}: rows, documents of each, tokens",
                code="conflict", field=name, value=tuple(shape), expected=str((b, k, s)),
            )  # fmt: skip
    answer = targets != -100
    lengths = answer.sum(-1)
    if bool((lengths != lengths[:, :1]).any()):
        raise RequestError(
            "the documents of a row have answers of different lengths; give the same answer behind each",
            code="conflict", field="targets", expected="the same number of counted tokens for each document of a row",
        )  # fmt: skip
    flat = [None if one is None else one.flatten(0, 1) for one in (targets, documents, source, source_documents)]
    wanted, own, read, padding = flat
    losses = model(
        tokens.flatten(0, 1), targets=wanted, documents=own, source=read, source_documents=padding, reduction="none"
    ).view(b, k, s)
    order = (~answer).int().argsort(dim=-1, stable=True)[..., : int(lengths.max())]  # aligns the answers
    counts = answer.gather(-1, order)
    if not bool((targets.gather(-1, order) == targets.gather(-1, order)[:, :1]).all()):
        raise RequestError(
            "the documents of a row have different answers; give the same behind each",
            code="conflict", field="targets", expected="the same tokens for each document of a row",
        )  # fmt: skip
    return marginal_nll(-losses.gather(-1, order), scores, form, counts[:, 0])
