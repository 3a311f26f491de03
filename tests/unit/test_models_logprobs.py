"""Log-probs computed chunk by chunk inside the output head equal a plain log-softmax, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from openrlhf.models.logprobs import ScoreRequest, logprobs_from_hidden, logprobs_from_logits, scoring_head

ROWS, HIDDEN, VOCAB = 13, 8, 37


def _inputs(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_()
    offset = torch.randn(VOCAB, generator=generator).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(VOCAB, (ROWS,), generator=generator)
    return hidden, weight, offset, targets


def _plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, t: float):
    log_softmax = (nn.functional.linear(hidden, weight, bias).double() / t).log_softmax(-1)
    return log_softmax.gather(-1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


def _request(targets: torch.Tensor, **options: object) -> ScoreRequest:
    return ScoreRequest(positions=torch.arange(targets.numel()), targets=targets, **options)


# Rows whose logits exist at a time, and of those the ones in float32.
@pytest.mark.parametrize(("chunk_rows", "wide_rows"), [(1, 1), (4, 1), (4, 3), (5, 100), (100, 100), (100, 2)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_a_plain_log_softmax(
    chunk_rows: int, wide_rows: int, temperature: float, bias: bool
) -> None:
    hidden, weight, offset, targets = _inputs(bias=bias)
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    coefficients = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    expected = _plain(hidden, weight, offset, targets, temperature)
    wanted = torch.autograd.grad((expected[0] * coefficients + expected[1] * coefficients.flip(0)).sum(), leaves)

    sizes = {"chunk_elements": chunk_rows * VOCAB, "wide_elements": wide_rows * VOCAB}
    request = _request(targets, temperature=temperature, entropy=True, **sizes)
    logprobs, entropy = logprobs_from_hidden(hidden, weight, offset, request)
    torch.testing.assert_close((logprobs, entropy), expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad((logprobs * coefficients + entropy * coefficients.flip(0)).sum(), leaves)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)

    without = logprobs_from_hidden(hidden, weight, offset, _request(targets, temperature=temperature, **sizes))
    assert without[1] is None
    torch.testing.assert_close(
        torch.autograd.grad((without[0] * coefficients).sum(), leaves),
        torch.autograd.grad((_plain(hidden, weight, offset, targets, temperature)[0] * coefficients).sum(), leaves),
    )


@pytest.mark.parametrize("entropy", [True, False])
def test_gradients_pass_a_numerical_check(entropy: bool) -> None:
    hidden, weight, bias, targets = _inputs()
    sizes = {"chunk_elements": 4 * VOCAB, "wide_elements": 3 * VOCAB}
    request = _request(targets, temperature=0.7, entropy=entropy, **sizes)

    def scored(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part for part in logprobs_from_hidden(*leaves, request) if part is not None)

    assert torch.autograd.gradcheck(scored, (hidden, weight, bias))


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    hidden, weight, bias, targets = _inputs()
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.no_grad():
            logprobs, _ = logprobs_from_hidden(hidden, weight, bias, _request(targets))
        assert not kept and logprobs.grad_fn is None
        logprobs_from_hidden(hidden, weight, bias, _request(targets))
        # Of the rows hidden states alone: no logits, no probabilities.
        assert max(tensor.numel() for tensor in kept if tensor.shape[:1] == (ROWS,)) == ROWS * HIDDEN


def test_a_frozen_head_and_frozen_hidden_states_get_no_gradient() -> None:
    hidden, weight, _, targets = _inputs()
    (only_hidden,) = torch.autograd.grad(
        logprobs_from_hidden(hidden, weight.detach(), None, _request(targets))[0].sum(), [hidden]
    )
    (only_weight,) = torch.autograd.grad(
        logprobs_from_hidden(hidden.detach(), weight, None, _request(targets))[0].sum(), [weight]
    )
    wanted = torch.autograd.grad(_plain(hidden, weight, None, targets, 1.0)[0].sum(), [hidden, weight])
    torch.testing.assert_close([only_hidden, only_weight], list(wanted))


def test_logits_that_exist_already_are_scored_alike() -> None:
    hidden, weight, bias, targets = _inputs()
    logits = nn.functional.linear(hidden, weight, bias)
    request = _request(targets, temperature=0.6, entropy=True, chunk_elements=3 * VOCAB)
    torch.testing.assert_close(
        logprobs_from_logits(logits, request), logprobs_from_hidden(hidden, weight, bias, request)
    )


def test_logprobs_belong_to_the_distribution_that_was_sampled() -> None:
    # RB41: the logits are divided by the temperature, not the log-probs.
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    found, _ = logprobs_from_logits(logits, _request(torch.arange(3), temperature=0.6))
    torch.testing.assert_close(found, torch.tensor([-0.202573, -1.86924, -3.535906]), rtol=0, atol=1e-5)


def test_logprobs_of_bf16_logits_are_computed_in_float32() -> None:
    # RB71
    logits = torch.tensor([[12.0, 11.9375, 3.0]] * 3, dtype=torch.bfloat16)
    found, _ = logprobs_from_logits(logits, _request(torch.arange(3)))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor([-0.662449, -0.724949, -9.662449]), rtol=0, atol=1e-5)
    # The same through a head: hidden states that pick out these logits.
    weight = torch.eye(3, dtype=torch.bfloat16)
    found, _ = logprobs_from_hidden(logits, weight, None, _request(torch.arange(3)))
    torch.testing.assert_close(found, torch.tensor([-0.662449, -0.724949, -9.662449]), rtol=0, atol=1e-5)


def test_gradients_of_chunks_are_added_up_in_float32_in_a_bf16_model() -> None:
    hidden, weight, _, targets = _inputs(torch.bfloat16, bias=False)
    whole, chunked = (
        torch.autograd.grad(
            logprobs_from_hidden(hidden, weight, None, _request(targets, chunk_elements=rows * VOCAB))[0].sum(), weight
        )[0]
        for rows in (ROWS, 1)
    )
    assert chunked.dtype == torch.bfloat16
    torch.testing.assert_close(chunked.float(), whole.float(), rtol=1e-2, atol=2e-2)


def test_a_token_of_probability_zero_leaves_the_entropy_and_its_gradient_finite() -> None:
    logits = torch.tensor([[1.0, 2.0, -torch.inf]], requires_grad=True)
    _, entropy = logprobs_from_logits(logits, _request(torch.tensor([0]), entropy=True))
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits[:, :2]).entropy())
    weight = torch.zeros(3, 2)
    bias = torch.tensor([1.0, 2.0, -torch.inf])
    hidden = torch.zeros(1, 2, requires_grad=True)
    request = _request(torch.tensor([0]), entropy=True)
    logprobs, entropy = logprobs_from_hidden(hidden, weight, bias, request)
    (logprobs + entropy).sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_a_value_that_is_not_a_number_surfaces() -> None:
    hidden, weight, bias, targets = _inputs()
    spoiled = hidden.detach().clone()
    spoiled[4] = float("nan")
    logprobs, _ = logprobs_from_hidden(spoiled, weight, bias, _request(targets))
    assert logprobs.isnan().tolist() == [row == 4 for row in range(ROWS)]


def test_a_head_answers_a_request_only_while_it_stands() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(HIDDEN, VOCAB)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model = Model()
    hidden = torch.randn(1, ROWS, HIDDEN)
    before = model.head(hidden)
    head = scoring_head(model)
    assert scoring_head(model) is head
    with pytest.raises(RuntimeError), head.answering(_request(torch.arange(ROWS))):
        assert model.head(hidden).shape == (1, ROWS, 1)
        raise RuntimeError
    assert torch.equal(model.head(hidden), before)
    model.head = nn.Bilinear(2, 2, 2)
    assert scoring_head(model) is None
