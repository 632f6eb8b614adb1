import json

import pytest

from dcformer.models.dcformer import DCFormerConfig
from dcformer.studies import times
from dcformer.studies.times import step_times
from dcformer.training import prepare_data, with_vocabulary

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}


def test_steps_are_timed_once(data, tmp_path, monkeypatch):
    prepared = prepare_data(data)
    configs = {str(n): with_vocabulary(DCFormerConfig(**TINY, num_hidden_layers=n), prepared.tokenizer) for n in (1, 12)}
    found = step_times(configs, prepared, {"batch_size": 2}, tmp_path, None)
    assert found == json.loads((tmp_path / "times.json").read_text()) and found["provenance"]["machine"]
    assert 0 < found["seconds"]["1"] < found["seconds"]["12"]

    train, names = times.train, []
    monkeypatch.setattr(times, "train", lambda config, *rest: names.append(config.num_hidden_layers) or train(config, *rest))
    assert step_times(configs, prepared, {"batch_size": 2}, tmp_path, None) == found and names == []
    path = tmp_path / "times.json"
    whole = path.read_text()
    for damaged in (whole[:100], "{}", "[]"):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"times.json is no measurement of steps; remove it"):
            step_times(configs, prepared, {"batch_size": 2}, tmp_path, None)
    path.write_text(whole)
    again = step_times(configs, prepared, {"batch_size": 1}, tmp_path, None)
    assert names == [1, 12] * 3  # in turn
    assert again["key"] != found["key"] and again["seconds"]["12"] != pytest.approx(found["seconds"]["12"], rel=1e-9)
