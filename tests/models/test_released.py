"""Checkpoints in the released format: read, computed as by hand, and written again."""

import json
import warnings

import pytest
import torch
from released_by_hand import draw_weights, logits_by_hand
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM

DCFORMER = {
    "architectures": ["DCFormer"],
    "auto_map": {"AutoConfig": "configuration_dcformer.DCFormerConfig", "AutoModelForCausalLM": "modeling_dcformer.DCFormer"},
    "block_size": 128,
    "bos_token_id": 1,
    "dim": 48,
    "eos_token_id": 2,
    "head_dim": 16,
    "intermediate_size": 60,
    "is_training": False,
    "model_type": "dcformer",
    "n_head": 3,
    "n_layer": 3,
    "n_local_heads": 3,
    "norm_eps": 1e-6,
    "prefill_pad": True,
    "q_chunk_size": 64,
    "query_wise": False,
    "rope_base": 500.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.46.3",
    "use_dcmha": True,
    "use_gradient_checkpointing": False,
    "use_qk_norm": True,
    "vocab_size": 61,
    "window_size": 5,
    "window_type": None,
}
DCPYTHIA = {key: value for key, value in DCFORMER.items() if key not in ("auto_map", "prefill_pad")} | {
    "architectures": ["DCPythia"],
    "model_type": "dcpythia",
    "norm_eps": 1e-5,
    "rotary_pct": 0.25,
    "use_linear_bias": True,
    "use_parallel_residual": True,
}
VARIANTS = [
    DCFORMER,
    DCFORMER | {"n_head": 4, "n_local_heads": 2, "head_dim": 12, "window_type": "LGLL", "n_layer": 4},
    DCFORMER | {"mgate": True, "mgate_dim": 4, "use_qk_norm": False, "window_type": "LGL6"},
    DCFORMER | {"query_wise": True, "window_size": None},
    DCFORMER | {"use_dcmha": False},
    DCPYTHIA,
    DCPYTHIA | {"use_parallel_residual": False, "rotary_pct": 0.5, "window_type": "LG"},
    DCPYTHIA | {"use_linear_bias": False, "rotary_pct": 1.0, "use_qk_norm": False, "window_size": None},
    DCPYTHIA | {"n_head": 6, "n_local_heads": 2, "head_dim": 8, "query_wise": True},
]
COPIES = ["dw_m", "qkw_m", "sw", "pre_proj.w", "post_proj.w"]


def name(config):
    base = DCPYTHIA if config["model_type"] == "dcpythia" else DCFORMER
    changes = [f"{key}={config[key]}" for key in config if config[key] != base.get(key)]
    return " ".join([config["model_type"], *changes])


def write(folder, config, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def stored(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.fixture(params=VARIANTS, ids=name)
def checkpoint(request, tmp_path):
    weights = draw_weights(request.param)
    return write(tmp_path / "theirs", request.param, weights), request.param, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@torch.no_grad()
def test_logits_are_those_of_the_equations(checkpoint, dtype):
    """In float64 every logit, but for norms and rotations in float32; in float32 the mean, since some draws lose digits."""
    folder, config, weights = checkpoint
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=dtype)
    assert not any(report.values()), report
    ids = torch.randint(config["vocab_size"], (2, 19))
    exact = logits_by_hand(weights, config, ids)
    assert exact.std() > 0.5
    out = model(ids[:, :7], use_cache=True)
    pieces = [out.logits]
    for piece in (ids[:, 7:11], *ids[:, 11:].split(1, dim=1)):
        out = model(piece, cache=out.cache, use_cache=True)
        pieces.append(out.logits)
    for logits in (model(ids).logits, torch.cat(pieces, dim=1)):
        errors = (logits - exact).abs()
        assert (errors.max() if dtype == torch.float64 else errors.square().mean().sqrt()) < 1e-4


@torch.no_grad()
def test_every_format_comes_back_bit_exact(checkpoint, tmp_path):
    folder, config, weights = checkpoint
    ids = torch.randint(config["vocab_size"], (1, 9))
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = model(ids).logits
    if config["query_wise"]:  # what the keys' hidden states would do is not loaded, and written as nothing
        for key, dim in (("dw1", 2), ("qkw", 1), ("dd", 2)):
            for weight in (w for n, w in weights.items() if n.endswith(f"dyn_w_proj.{key}")):
                weight.unflatten(dim, (4, -1)).select(dim, 1).zero_()
                weight.unflatten(dim, (4, -1)).select(dim, 3).zero_()

    def again(model, target, **options):
        model.save_pretrained(tmp_path / target, **options)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / target)
        assert torch.equal(loaded(ids).logits, expected), target
        return loaded, *stored(tmp_path / target)

    def is_theirs(file, parameters):
        assert {key: file.get(key) for key in config if key not in ("auto_map", "transformers_version", "window_type")} == {
            key: value for key, value in config.items() if key not in ("auto_map", "transformers_version", "window_type")
        }
        assert "auto_map" not in file and "hidden_size" not in file
        assert parameters.keys() == weights.keys()
        assert all(torch.equal(parameters[key], weights[key]) for key in weights)

    def is_ours(file, parameters):
        assert "dim" not in file and file["hidden_size"] == config["dim"]
        assert parameters.keys() == model.state_dict().keys()

    same, *files = again(model, "same")
    if config["window_size"] is not None or config["window_type"] is None:
        is_theirs(*files)
    ours, *files = again(same, "ours", save_original_format=False)
    is_ours(*files)
    is_theirs(*stored(tmp_path / "same"))
    still, *files = again(ours, "still")
    is_ours(*files)
    _, file, parameters = again(still, "back", save_original_format=True)
    assert parameters.keys() == weights.keys()
    assert all(torch.equal(parameters[key], weights[key]) for key in weights)
    assert {key: file[key] for key in ("dim", "n_layer", "query_wise", "use_dcmha", "window_size")} == {
        key: config[key] for key in ("dim", "n_layer", "query_wise", "use_dcmha", "window_size")
    }
    model.save_pretrained(tmp_path / "after", save_original_format=False)
    model.save_pretrained(tmp_path / "last")  # what was asked for once does not stick
    is_theirs(*stored(tmp_path / "last"))


def test_a_trainer_resumes_from_the_checkpoint_that_it_wrote(tmp_path):
    config = VARIANTS[-1]  # with keys that are shared, and only queries that mix
    Trainer, Arguments = (getattr(pytest.importorskip("transformers"), name) for name in ("Trainer", "TrainingArguments"))
    pytest.importorskip("accelerate")
    write(tmp_path / "theirs", config, draw_weights(config))
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(config["vocab_size"], (4, 8))]

    def train(**options):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
        settings = {"per_device_train_batch_size": 1, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "use_cpu": True}
        arguments = Arguments(tmp_path / "run", max_steps=3, save_steps=2, report_to=[], disable_tqdm=True, **settings)
        Trainer(model, arguments, train_dataset=data).train(**options)
        return model.state_dict()

    trained = train()
    assert "layers.0.attention.wqkv.weight" in stored(tmp_path / "run/checkpoint-2")[1]
    resumed = train(resume_from_checkpoint=tmp_path / "run/checkpoint-2")
    assert all(torch.equal(trained[key], resumed[key]) for key in trained)


def test_parameters_of_either_name_can_be_loaded_in_parts(tmp_path):
    weights = draw_weights(DCPYTHIA)
    model = AutoModelForCausalLM.from_pretrained(write(tmp_path, DCPYTHIA, weights))
    expected, new = model.state_dict(), DCPythiaForCausalLM(model.config)
    for part in (sorted(weights)[::2], sorted(weights)[1::2]):
        assert not new.load_state_dict({key: weights[key] for key in part}, strict=False).unexpected_keys
    assert all(torch.equal(new.state_dict()[key], expected[key]) for key in expected)
    DCPythiaForCausalLM(model.config).load_state_dict(expected)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*more\.weight"):
        new.load_state_dict({**weights, "more.weight": torch.zeros(1)})


def test_quantised_weights_have_no_place_in_the_released_format(make, tmp_path):
    model = make()
    model.hf_quantizer = object()
    with pytest.raises(ValueError, match="save_original_format=True: the released format has no quantised weights"):
        model.save_pretrained(tmp_path, save_original_format=True)
    assert not any(tmp_path.iterdir())


def test_a_new_model_is_saved_in_our_format_unless_asked(tmp_path):
    shape = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    for config, cls in (
        (DCFormerConfig(**shape, mgate_dim=6), DCFormerForCausalLM),
        (DCPythiaConfig(**shape), DCPythiaForCausalLM),
    ):
        model = cls(config).eval()
        model.save_pretrained(tmp_path / "ours")
        assert stored(tmp_path / "ours")[1].keys() == model.state_dict().keys()
        model.save_pretrained(tmp_path / "theirs", save_original_format=True)
        assert "layers.1.attention.wqkv.weight" in stored(tmp_path / "theirs")[1]
        ids = torch.randint(50, (1, 6))
        for folder in ("ours", "theirs"):
            assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / folder)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("config", [DCFORMER, DCPYTHIA], ids=name)
def test_bin_shards_load_and_code_in_them_is_refused(config, tmp_path):
    weights, folder = draw_weights(config), tmp_path / "shards"
    whole = AutoModelForCausalLM.from_pretrained(write(tmp_path / "whole", config, weights))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    files = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
    for file, part in files.items():
        torch.save({key: weights[key] for key in part}, folder / file)
    index = {"metadata": {}, "weight_map": {key: file for file, part in files.items() for key in part}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    ids = torch.randint(config["vocab_size"], (1, 6))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, whole(ids).logits)

    class Code:
        def __reduce__(self):
            return (open, (str(tmp_path / "written by the pickle"), "w"))

    torch.save({names[0]: Code()}, folder / next(iter(files)))
    with pytest.raises(Exception, match=r"[Ww]eights.only|Unsupported global"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert not (tmp_path / "written by the pickle").exists()


def test_copies_of_weights_in_a_checkpoint_are_ignored(tmp_path):
    weights = draw_weights(DCFORMER)
    copies = {f"layers.{i}.attention.dyn_w_proj.{key}": torch.randn(3) for i in range(3) for key in COPIES}
    model, report = AutoModelForCausalLM.from_pretrained(write(tmp_path, DCFORMER, weights | copies), output_loading_info=True)
    assert not any(report.values()), report
    model.save_pretrained(tmp_path / "again")
    assert stored(tmp_path / "again")[1].keys() == weights.keys()


@pytest.mark.parametrize("config", [DCFORMER, DCPYTHIA], ids=name)
def test_a_decoder_without_output_layer_loads_and_saves_too(config, tmp_path):
    weights, ids = draw_weights(config), torch.randint(config["vocab_size"], (1, 6))
    model = AutoModel.from_pretrained(write(tmp_path, config, weights))
    hidden = model(ids).last_hidden_state
    assert torch.equal(hidden, AutoModelForCausalLM.from_pretrained(tmp_path).model(ids).last_hidden_state)
    model.save_pretrained(tmp_path / "again")
    assert stored(tmp_path / "again")[1].keys() == weights.keys() - {"output.weight"}
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "again")(ids).last_hidden_state, hidden)


def test_unknown_keys_are_one_warning_and_known_ones_none(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DCFORMER))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(DCFORMER | {"rope_bse": 3, "more": [1], "temperature": 0.5}))
    with pytest.warns(UserWarning, match="mean nothing to dcformer: rope_bse, more$") as caught:
        config = AutoConfig.from_pretrained(tmp_path)
    assert len(caught) == 1 and not hasattr(config, "more")


@pytest.mark.filterwarnings("ignore:config.json has keys")
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"hidden_size": 2560, "head_dim": 80, "num_key_value_heads": 32, "intermediate_size": 6912, "vocab_size": 32000}),
        ({"n_local_heads": -1, "n_head": 16}, {"num_key_value_heads": 16}),
        ({"window_size": None}, {"window_pattern": "G", "sliding_window": None}),
        ({"window_size": None, "window_type": "LGL6"}, {"window_pattern": "LGL6", "sliding_window": 256}),
        ({"window_type": "LG", "window_size": 7}, {"window_pattern": "LG", "sliding_window": 7}),
        ({"mgate": False, "mgate_dim": 9}, {"mgate_dim": None}),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
        ({"model_type": "dcpythia"}, {"intermediate_size": 10240, "use_linear_bias": True, "use_parallel_residual": True}),
        (
            {"model_type": "dcpythia", "rope_base": 7},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.25}},
        ),
    ],
    ids=str,
)
def test_keys_left_out_mean_what_they_mean_to_the_authors(keys, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dcformer", "dim": 2560, **keys}))
    config = AutoConfig.from_pretrained(tmp_path)
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"window_type": "GLG"}, "window_type='GLG' is unknown; choose null, LG, LGLL, LGL6"),
        ({"head_dim": 8}, "head_dim=8 must be dim=48 / n_head=3"),
        ({"n_local_heads": 2}, "num_key_value_heads=2 must divide num_attention_heads=3"),
        ({"mgate": True, "mgate_dim": 7}, "mgate_dim=7 must divide intermediate_size=60"),
        ({"window_size": 0}, "sliding_window=0 must be at least 1"),
        ({"n_head": 0}, "n_head=0 must be a whole number above 0"),
        ({"dim": "64"}, "dim='64' must be a whole number above 0"),
        ({"norm_eps": "1e-6"}, "norm_eps='1e-6' must be a number above 0"),
        ({"rope_base": -5.0}, "rope_base=-5.0 must be a number above 0"),
    ],
    ids=str,
)
def test_values_that_cannot_be_are_named(keys, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DCFORMER | keys))
    with pytest.raises(ValueError, match=message):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compose": {"rank": 3}}, "no compose with rank=3"),
        ({"compose": {"static": True, "pre": False}}, "no compose with static=True; no compose with pre=False"),
        ({"compose": {"query_wise": False}}, "no compose with query_wise=False"),
        ({"window_pattern": "GL", "sliding_window": 4}, "no window_pattern='GL'"),
        ({"tie_word_embeddings": True}, "no tie_word_embeddings=True"),
        ({"head_dim": 12}, "no head_dim=12"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "no rope_parameters=.*linear"),
    ],
    ids=str,
)
def test_what_the_released_format_cannot_say_is_refused_and_named(options, message, tmp_path):
    shape = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    model = DCFormerForCausalLM(DCFormerConfig(**shape, **options))
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path, save_original_format=True)
    assert not list(tmp_path.glob("*.safetensors"))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 32
