"""Meaning of `config.json`, and refusals by name."""

import json
from math import log, sqrt
from typing import Any

import pytest
from hf_variants import LLAMA3_ROPE, LONGROPE, VARIANTS, YARN, write_variant
from test_hf import edit_config, parse, refuse

from convert.hf.config import parse_config
from zdc_jax.config import RopeConfig

# --- What a config means ---------------------------------------------------------------------------------

MEANINGS: dict[str, dict[str, Any]] = {
    "llama-mha": {"num_kv_heads": 4, "head_dim": 12, "tie_embeddings": False, "rope": RopeConfig(theta=1e4)},
    "llama-gqa": {"num_kv_heads": 2, "group_size": 2},
    "llama-mqa": {"num_kv_heads": 1, "group_size": 4},
    "llama-tied": {"tie_embeddings": True},
    "llama-biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "llama-linear-old": {"rope": RopeConfig(theta=1e4, kind="linear", factor=4.0)},
    "llama-linear-new": {"rope": RopeConfig(theta=5e3, kind="linear", factor=4.0)},
    "llama-head-dim-80": {"head_dim": 80, "embed_dim": 48},
    "llama-gelu": {"activation": "gelu"},
    "mistral": {"window": 8, "head_dim": 16, "num_kv_heads": 2, "qkv_bias": False},
    "qwen2": {"window": None, "qkv_bias": True, "out_bias": False, "mlp_bias": False},
    "phi3": {"window": 12, "num_heads": 4, "norm_offset": 0.0, "embed_scale": 1.0},
    "llama-yarn": {
        "rope": RopeConfig(
            theta=1e4, kind="yarn", factor=4.0, original_max_positions=32, attention_factor=1 + 0.1 * log(4)
        )
    },
    "phi3-long": {
        "rope": RopeConfig(
            theta=1e4,
            kind="longrope",
            original_max_positions=16,
            attention_factor=sqrt(1 + log(8) / log(16)),
            short_factors=tuple(LONGROPE["short_factor"]),
            long_factors=tuple(LONGROPE["long_factor"]),
        )
    },
    "opt": {
        "rope": None,
        "num_position_rows": 130,
        "qkv_bias": True,
        "final_norm": True,
        "token_embed_dim": None,
        "tie_embeddings": True,
    },
    "opt-350m-like": {"norms": "post", "final_norm": False, "token_embed_dim": 32},
    "opt-no-bias": {"qkv_bias": False, "out_bias": False, "mlp_bias": False},
    "opt-no-final-norm": {"norms": "pre", "final_norm": False},
}


@pytest.mark.parametrize("name", MEANINGS)
def test_meaning_of_configs(name, tmp_path):
    config = parse(name, tmp_path)
    (layer,) = {*config.layers}
    found = {name: getattr(layer if hasattr(layer, name) else config, name) for name in MEANINGS[name]}
    assert found == MEANINGS[name]


LAYERS_THAT_SLIDE = {
    # No context exceeds 128 positions, so plans may truncate these layers like any other.
    "mistral-idle-window": [None, None],
    "qwen2-sliding": [None, 8],
    "qwen3-sliding": [8, None],
    "gemma3": [8, None, 8],
    "gemma3-old": [8, 8, None],
}


@pytest.mark.parametrize("name", LAYERS_THAT_SLIDE)
def test_layers_that_slide(name, tmp_path):
    config = parse(name, tmp_path)
    assert [layer.window for layer in config.layers] == LAYERS_THAT_SLIDE[name]
    if "gemma3" in name:
        slow, fast = (2e4, 700.0) if name == "gemma3-old" else (1e4, 500.0)
        full, sliding = RopeConfig(theta=slow, kind="linear", factor=8.0), RopeConfig(theta=fast)
        assert [layer.rope for layer in config.layers] == [
            sliding if x.window else full for x in config.layers
        ]
        assert (config.norm_offset, config.embed_scale) == (1, 48**0.5)
        assert {(x.norms, x.qk_norm, x.scale) for x in config.layers} == {("sandwich", True, 24**-0.5)}


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_old_and_new_rope_settings_mean_the_same(kind_key, tmp_path):
    scaling = {kind_key: "llama3", **LLAMA3_ROPE}
    old = parse("llama-mha", tmp_path / "old", rope_theta=7e3, rope_scaling=scaling)
    new = parse("llama-mha", tmp_path / "new", rope_parameters={"rope_theta": 7e3, **scaling})
    beside = parse(
        "llama-mha",
        tmp_path / "beside",
        rope_theta=7e3,
        rope_scaling=scaling | {"original_max_position_embeddings": 99},
        original_max_position_embeddings=32,
    )
    assert old.layers[0].rope == new.layers[0].rope == beside.layers[0].rope
    assert old.layers[0].rope == RopeConfig(
        theta=7e3,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=32,
    )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("silu", "silu"),
        ("relu", "relu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
    ],
)
def test_activations(theirs, ours, tmp_path):
    for name, setting in (("llama-mha", "hidden_act"), ("opt", "activation_function")):
        config = parse(name, tmp_path / name, **{setting: theirs})
        assert config.activation == ours


def test_su_is_the_first_name_of_longrope(tmp_path):
    settings = {"rope_scaling": LONGROPE, "original_max_position_embeddings": 16}
    expected = parse("llama-mha", tmp_path / "new", **settings)
    old = {name: value for name, value in LONGROPE.items() if name != "rope_type"} | {"type": "su"}
    assert parse("llama-mha", tmp_path / "old", **settings | {"rope_scaling": old}) == expected


@pytest.mark.parametrize("with_config", [False, True])
def test_adapters_are_told_to_be_merged(with_config, tmp_path, monkeypatch):
    folder = write_variant("llama-gqa", tmp_path / "hf")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "some/model"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    assert parse_config(folder, "float32").num_layers == 2, "a merged folder may keep the file"
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    if not with_config:
        (folder / "config.json").unlink()
    message = (
        r"hf is an adapter \(peft_type='LORA'\) of the model 'some/model', not a model .*merge_and_unload"
    )
    refuse(folder, message, monkeypatch)


def test_null_means_the_default(tmp_path):
    nulls = dict.fromkeys(
        ("head_dim", "rope_scaling", "num_key_value_heads", "attention_bias", "quantization_config")
    )
    assert parse("llama-mha", tmp_path / "null", **nulls) == parse("llama-mha", tmp_path / "plain")


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [(2, None, (2,)), ([3, 4], None, (3, 4)), (None, None, ()), (2, [2, 9], (2, 9)), (None, 5, (5,))],
)
def test_end_ids_of_both_files(own, generation, expected, tmp_path):
    write_variant("llama-mha", tmp_path)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert parse_config(edit_config(tmp_path, eos_token_id=own), "float32").eos_ids == expected


# --- Refusals --------------------------------------------------------------------------------------------

CONFIG_ERRORS: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama-mha",
        {"architectures": ["GPT2LMHeadModel"]},
        r"GPT2LMHeadModel.*supported are .*LlamaForCausalLM",
    ),
    ("llama-mha", {"architectures": None}, r"architectures=\[\] is not supported"),
    ("llama-mha", {"architectures": [["LlamaForCausalLM"]]}, r"architectures=\[\[.* must be a list of names"),
    ("llama-mha", {"architectures": {"LlamaForCausalLM": 1}}, r"architectures={.* must be a list of names"),
    ("llama-mha", {"architectures": 5}, "architectures=5 must be a list of names"),
    ("llama-mha", {"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq'.*float32"),
    ("llama-mha", {"quantization_config": 4}, "quant_method=4.*float32"),
    ("llama-mha", {"num_hidden_layers": 2**31}, "num_layers.*integer from 1 to 4096"),
    ("opt", {"num_hidden_layers": 4097}, "num_layers.*integer from 1 to 4096"),
    ("llama-mha", {"num_hidden_layers": 2.0}, "num_layers.*integer from 1 to 4096"),
    ("llama-mha", {"max_position_embeddings": 2**31}, "max_positions=2147483648 .* from 1 to 2147483647"),
    ("llama-mha", {"eos_token_id": 2**31}, "eos_ids=.* integer from"),
    ("llama-mha", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
    ("llama-mha", {"rms_norm_eps": float("nan")}, "norm_eps=nan must be"),
    ("llama-mha", {"rope_theta": float("inf")}, "theta=inf must be a finite number"),
    ("llama-mha", {"rope_theta": -1}, "theta=-1.0 must be > 0"),
    ("llama-mha", {"rope_theta": 10**400}, "config.json: int too large to convert to float"),
    ("llama-mha", {"hidden_act": ["silu"]}, r"\['silu'\] is not supported"),
    ("llama-mha", {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "'ntk'.*'default', .*'yarn'"),
    ("llama-mha", {"rope_parameters": {"rope_type": "longrope"}}, "config.json: missing 'short_factor'"),
    (
        "phi3-long",
        {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 5}},
        "long_factors has 5 .* must have 6",
    ),
    ("phi3-long", {"rope_scaling": LONGROPE | {"short_factor": [0.0] * 6}}, "short_factors must all be > 0"),
    ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75 is not supported; only 1 is"),
    ("llama-yarn", {"rope_scaling": YARN | {"rope_theta": 1}}, "theta=1.0 must be > 1 for kind='yarn'"),
    ("mistral", {"sliding_window": 0}, "window=0 must be an integer >= 1"),
    ("mistral", {"sliding_window": "8"}, "window='8' must be an integer"),
    (
        "qwen2-sliding",
        {"sliding_window": None},
        "sliding_window=null must be an integer, because",
    ),
    ("qwen2-sliding", {"layer_types": ["full_attention"]}, "layer_types=.* must be a list of 2"),
    (
        "gemma3",
        {"layer_types": ["chunked"] * 3},
        r"'chunked' is not supported; supported are \['sliding",
    ),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
    ("gemma3", {"query_pre_attn_scalar": -4}, "scale=.* must be a finite number"),
    (
        "gemma3",
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
        "must have entries by type",
    ),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "sliding_window=null must be an integer"),
    *((name, {"is_causal": False}, "is_causal=false is not supported") for name in ("qwen2", "opt")),
    ("gemma3-old", {"sliding_window_pattern": 0}, "config.json: .*zero"),
    ("llama-mha", {"rope_scaling": {"type": "linear"}}, "config.json: missing 'factor'"),
    ("llama-mha", {"hidden_act": "swiglu"}, "'swiglu' is not supported; supported are .*'silu'"),
    ("llama-mha", {"hidden_size": "wide"}, "config.json: "),
    ("llama-mha", {"num_key_value_heads": 3}, "multiple of num_kv_heads=3"),
    ("opt", {"activation_function": "elu"}, "'elu' is not supported"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=False"),
]


@pytest.mark.parametrize(("name", "changes", "message"), CONFIG_ERRORS)
def test_unsupported_configs_are_refused(name, changes, message, tmp_path, monkeypatch):
    refuse(edit_config(write_variant(name, tmp_path / "hf"), **changes), message, monkeypatch)


FIELDS = {
    "llama-gqa": ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"),
    "opt": ("ffn_dim", "num_hidden_layers", "max_position_embeddings"),
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in FIELDS for field in FIELDS[name]])
def test_missing_fields_are_named(name, field, tmp_path, monkeypatch):
    path = write_variant(name, tmp_path / "hf") / "config.json"
    raw = VARIANTS[name].config
    path.write_text(json.dumps({key: value for key, value in raw.items() if key != field}))
    refuse(tmp_path / "hf", f"config.json: missing '{field}'", monkeypatch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "config.json").unlink(), "hf has no config.json"),
        (lambda p: (p / "config.json").write_text("{"), "cannot read .*config.json"),
        (lambda p: (p / "config.json").write_text('{"a":' * 10**5), "cannot read .*nested too deep"),
        (lambda p: (p / "config.json").write_text("[]"), "must contain a JSON object, found list"),
        (lambda p: p.rename(p.parent / "gone"), "hf is not a folder"),
    ],
)
def test_unreadable_configs_are_refused(change, message, tmp_path, monkeypatch):
    change(write_variant("llama-gqa", tmp_path / "hf"))
    refuse(tmp_path / "hf", message, monkeypatch)
