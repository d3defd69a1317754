"""RAG's losses against `transformers`: outputs, gradients of the scores and of the generator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import glassformer as gf
from glassformer.retrieval import marginal_nll, rag_loss
from tests.refused import refused

V, B, K, S = 61, 2, 3, 6
FORMS = {"token": transformers.RagTokenForGeneration, "sequence": transformers.RagSequenceForGeneration}


def bart() -> transformers.BartForConditionalGeneration:
    torch.manual_seed(0)
    shape = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=V, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32,
            pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
            init_std=0.3, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, **shape,
        )
    ).eval()  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_loss_of_transformers(form: str, tmp_path: Path):
    generator = bart()
    generator.save_pretrained(tmp_path)
    mine = gf.load(tmp_path).model
    question = transformers.DPRQuestionEncoder(
        transformers.DPRConfig(
            vocab_size=V, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        )
    )
    config = transformers.RagConfig.from_question_encoder_generator_configs(
        question.config, generator.config, n_docs=K, do_deduplication=False
    )
    rag = FORMS[form](config=config, question_encoder=question, generator=generator).eval()
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(3, V, (B, S), generator=draw)
    labels[1, -2:] = 1  # padding
    context = torch.randint(3, V, (B * K, 9), generator=draw)
    real = torch.ones_like(context)
    real[1, 6:] = 0
    context[1, 6:] = 1
    scores = torch.randn(B, K, generator=draw).requires_grad_()
    wanted = rag(
        context_input_ids=context, context_attention_mask=real, doc_scores=scores, labels=labels, n_docs=K
    ).loss
    # Labels y_1 .. y_s are read as they are, and y_2 .. y_s predicted.
    tokens = labels[:, None, :-1].expand(-1, K, -1)
    targets = labels[:, None, 1:].expand(-1, K, -1)
    targets = targets.where(targets != 1, -100)
    ours = scores.detach().clone().requires_grad_()
    found = rag_loss(
        mine, tokens, targets, ours, form, source=context.view(B, K, -1), source_documents=real.view(B, K, -1)
    )
    torch.testing.assert_close(found, wanted.view(-1) if wanted.numel() > 1 else wanted.expand(B), rtol=1e-5, atol=1e-5)
    given = torch.tensor([1.0, -0.3])
    (wanted * given).sum().backward()
    (found * given).sum().backward()
    torch.testing.assert_close(ours.grad, scores.grad, rtol=1e-5, atol=1e-6)
    theirs = generator.model.shared.weight.grad
    torch.testing.assert_close(mine.embedding.weight.grad, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_the_sum_over_documents_is_theirs(form: str):
    """`get_nll` on logits; gradients of the logits and of the scores."""
    logits = torch.randn(B * K, S, V, generator=torch.Generator().manual_seed(0)).requires_grad_()
    scores = torch.randn(B, K, generator=torch.Generator().manual_seed(1)).requires_grad_()
    target = torch.randint(3, V, (B, S), generator=torch.Generator().manual_seed(2))
    found = marginal_nll(
        logits.log_softmax(-1).view(B, K, S, V).gather(-1, target[:, None, :, None].expand(-1, K, -1, 1))[..., 0],
        scores, form,
    )  # fmt: skip
    logp, prior = logits.double().softmax(-1).view(B, K, S, V), scores.double().softmax(-1)
    wanted = []
    for b in range(B):  # the paper's products and sums of probabilities
        each = [[logp[b, z, t, target[b, t]] for t in range(S)] for z in range(K)]
        if form == "token":
            p = torch.stack([sum(prior[b, z] * each[z][t] for z in range(K)) for t in range(S)]).prod()
        else:
            p = sum(prior[b, z] * torch.stack(each[z]).prod() for z in range(K))
        wanted.append(-p.log())
    torch.testing.assert_close(found.double(), torch.stack(wanted), rtol=1e-5, atol=1e-5)
    mine, theirs = (torch.autograd.grad(one.sum(), (logits, scores)) for one in (found.double(), torch.stack(wanted)))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_decoder_reads_each_document_before_the_answer():
    """Documents of different lengths, padded at the end, give the result of each read separately."""
    model = gf.preset(f"llama@1m+layers=1+d_model=16+heads=2+vocab_size={V}+context=32").build(seed=0)
    answer, passages = [5, 6, 7], [[8], [9, 10, 11], [12, 13]]
    tokens, targets = torch.zeros(1, K, 6, dtype=torch.long), torch.full((1, K, 6), -100)
    documents, alone = torch.zeros(1, K, 6, dtype=torch.long), []
    for z, passage in enumerate(passages):
        text = torch.tensor(passage + answer)
        n = len(text) - 1
        tokens[0, z, :n], documents[0, z, :n] = text[:-1], 1
        targets[0, z, n - 3 : n] = text[-3:]
        logp = model(text[None, :-1]).log_softmax(-1)[0, -3:]
        alone.append(logp.gather(-1, text[-3:, None])[:, 0])
    scores = torch.tensor([[0.5, -1.0, 2.0]])
    for form in FORMS:
        wanted = marginal_nll(torch.stack(alone)[None], scores, form)
        torch.testing.assert_close(rag_loss(model, tokens, targets, scores, form, documents), wanted)
    shorter = targets.clone()
    shorter[0, 0][shorter[0, 0] == 7] = -100
    with refused(code="conflict", field="targets"):
        rag_loss(model, tokens, shorter, scores)
    wrong = targets.clone()
    wrong[0, 0][wrong[0, 0] == 6] = 7
    with refused(code="conflict", field="targets"):
        rag_loss(model, tokens, wrong, scores)
    with refused(code="conflict", field="scores"):
        rag_loss(model, tokens, targets, scores[:, :2])
    with refused(code="unknown", field="form"):
        rag_loss(model, tokens, targets, scores, "document")  # type: ignore[arg-type]
