"""The hard case, the choice of text, and errors about models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the lab extra is not installed")

from kvq_lab import eval_models
from kvq_lab.assets import AssetError
from kvq_lab.eval_models import add_key_outliers_, calibration_ids, check_model, load, windows
from kvq_lab.eval_outliers import channel_statistics
from kvq_ops.errors import FormatError, ShapeError
from tests.lab import eval_toys


@pytest.fixture(autouse=True)
def short_texts(monkeypatch) -> None:
    monkeypatch.setattr(eval_models, "texts", eval_toys.texts)


def _keys(model, ids: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        return [layer.keys for layer in model(ids, use_cache=True).past_key_values.layers]


def test_the_hard_case_computes_what_it_did_with_other_keys() -> None:
    model = eval_toys.tiny_llama()
    ids = torch.randint(0, 256, (2, 40))
    with torch.no_grad():
        before = model(ids).logits
    plain = _keys(model, ids)
    channels = add_key_outliers_(model, pairs=(3, 9))
    assert channels == [3, 9, 19, 25]
    with torch.no_grad():
        after = model(ids).logits
    # A factor of thirty is no power of two, so weights are rounded once more.
    assert (after - before).abs().max() < 1e-4 * before.abs().max()
    for old, new in zip(plain, _keys(model, ids), strict=True):
        torch.testing.assert_close(new[..., channels], 30 * old[..., channels], rtol=2e-3, atol=1e-3)
        rest = [c for c in range(eval_toys.HEAD_DIM) if c not in channels]
        torch.testing.assert_close(new[..., rest], old[..., rest], rtol=2e-3, atol=1e-3)
        outlying = channel_statistics(new).outlying
        assert outlying[:, channels].all()


def test_outliers_in_one_half_of_a_pair_would_change_the_model() -> None:
    """The broken twin: rotary embedding mixes the pair, so half of it does not commute."""
    model = eval_toys.tiny_llama()
    ids = torch.randint(0, 256, (1, 40))
    with torch.no_grad():
        before = model(ids).logits
        for block in (layer.self_attn for layer in model.model.layers):
            for projection, by in ((block.k_proj, 30.0), (block.q_proj, 1 / 30.0)):
                projection.weight.view(-1, eval_toys.HEAD_DIM, 64)[:, 3] *= by
        after = model(ids).logits
    assert (after - before).abs().max() > 0.01 * before.abs().max()


def test_models_that_normalize_keys_are_refused() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    with pytest.raises(FormatError, match="normalized keys"):
        add_key_outliers_(Qwen3ForCausalLM(config))


def test_pairs_beyond_the_head_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"0\.\.15"):
        add_key_outliers_(eval_toys.tiny_llama(), pairs=(16,))


def test_windows_come_from_the_texts_in_turn_and_do_not_overlap() -> None:
    names, ids = windows(eval_toys.subject(), 4, 100)
    assert [name.split()[0] for name in names] == ["emma", "emma", "afaq", "afaq"]
    assert ids.shape == (4, 100)
    emma = torch.tensor(list(eval_toys.texts()["emma"].encode()))
    starts = [int(name.split()[-1]) for name in names[:2]]
    assert starts[1] - starts[0] > 100
    for start, row in zip(starts, ids, strict=False):
        assert torch.equal(row, emma[start : start + 100])


def test_a_window_begins_with_the_bos_token_where_the_model_has_one() -> None:
    plain, begun = (
        windows(eval_models.Subject("toy", "Toy", None, eval_toys.ByteTokenizer(), bos), 1, 50)[1]
        for bos in (None, 2)
    )
    assert begun[0, 0] == 2
    assert torch.equal(begun[0, 1:], plain[0, :-1])


def test_a_window_beyond_the_text_is_refused() -> None:
    with pytest.raises(ShapeError, match="KVQ_TEXT"):
        windows(eval_toys.subject(), 1, 10_000)


def test_calibration_reads_other_text_than_what_is_scored() -> None:
    name, ids = calibration_ids(eval_toys.subject(), rows=2, length=64)
    assert name not in eval_models.SCORED_TEXTS
    assert ids.shape == (2, 64)


@pytest.mark.parametrize("name", ["smolm2", "/no/such/folder"])
def test_an_unknown_model_lists_what_is_allowed(name: str) -> None:
    with pytest.raises(FormatError) as refused:
        check_model(name)
    for allowed in ("smollm2", "smollm2-outliers", "gemma3", "config.json"):
        assert allowed in str(refused.value)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="without a config.json"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(AssetError, match="causal language model"):
        load(str(tmp_path))


def test_the_default_and_the_hard_model_have_the_same_function(monkeypatch) -> None:
    from kvq_lab import assets

    monkeypatch.setattr(
        assets,
        "load_smollm2",
        lambda: (eval_toys.tiny_llama(hidden_size=128, head_dim=64), eval_toys.ByteTokenizer()),
    )
    plain, hard = load("smollm2"), load("smollm2-outliers")
    assert "5, 17, 37, 49" in hard.note
    assert not plain.note
    ids = torch.randint(0, 256, (1, 30))
    with torch.no_grad():
        want, got = (found.model(ids).logits for found in (plain, hard))
    assert 0 < (got - want).abs().max() < 1e-4 * want.abs().max()
