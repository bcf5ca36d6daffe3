"""Every mistake in a config or on the command line ends in one clear sentence."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest
from places import ROOT

from rlhf_jax.config import checks, command_line, default, derived
from rlhf_jax.config import schema as configs
from rlhf_jax.mesh import ONE_DEVICE
from rlhf_jax.monitoring.callbacks import StopAt
from rlhf_jax.setup import sample_checks, validation
from rlhf_jax.setup.validation import OWN_MEASURES
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import ModelConfig, ModelConfigs

CONFIG_FILE = """
from rlhf_jax import config as defaults
def get_config():
    config = defaults.default()
    config.steps = 7
    config.reward.metrics = {"other": "file.py:function"}
    return config
"""

PROGRAM = """
import sys
from rlhf_jax.config import command_line
try:
    config = command_line.read(sys.argv)
except (ValueError, FileNotFoundError) as error:
    sys.exit(str(error))
print(config.steps, config.training.learning_rate)
"""


@pytest.fixture
def config_file(tmp_path) -> str:
    path = tmp_path / "config.py"
    path.write_text(CONFIG_FILE)
    return str(path)


@pytest.fixture
def valid(tmp_path):
    """A config that passes, on eight devices."""
    config = default()
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text('{"prompt": "a"}\n')
    (tmp_path / "reward.py").write_text(
        "def length(prompt, response, row):\n    return float(len(response))\n"
    )
    config.model.path = "folder"
    config.data.update(train=str(tmp_path / "train.jsonl"), eval=str(tmp_path / "eval.jsonl"))
    config.reward.functions = (f"{tmp_path / 'reward.py'}:length",)
    return config


def test_the_default_is_locked():
    config = default()
    with pytest.raises(AttributeError):
        config.training.learnig_rate = 1.0


def test_every_key_has_a_comment():
    source = (ROOT / "rlhf_jax" / "config" / "schema.py").read_text().partition("EARLIER = ")[0]
    bare = re.findall(r'(?<!#)\n +"(\w+)": ', re.sub(r" +#.*", "#", source))
    sections = {"model", "drafter", "critic", "data", "reward", "generation", "evaluation"}
    sections |= {"algorithm", "kl", "training", "checkpoint", "mesh", "kernels"}
    assert set(bare) <= sections


def test_overrides_keep_their_types(config_file):
    overrides = [
        "--config.training.learning_rate=1",
        "--config.training.drop_overlong=true",
        "--config.workdir=a=b",
    ]
    config = command_line.read(["train.py", f"--config={config_file}", *overrides])
    assert (config.steps, config.training.learning_rate) == (7, 1.0)
    assert config.training.drop_overlong is True
    assert config.workdir == "a=b"
    assert config.reward.metrics.to_dict() == {"other": "file.py:function"}
    assert config.is_locked


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--config.training.learning_rat=1", "did you mean 'training.learning_rate'"),
        ("--config.generation.rows=4", "did you mean 'generation.max_rows'"),
        ("--config.learning_rate=1", "did you mean 'training.learning_rate'"),
        ("--config.nothing.like.it=1", "no config key 'nothing.like.it'"),
        ("--config.mesh=1", "no config key 'mesh'"),
        ("--config.steps=many", "'steps' is of type int; 'many' is not"),
        ("--config.steps=2.5", "'steps' is of type int"),
        ("--config.training.learning_rate=fast", "is of type float"),
        ("--config.training.drop_overlong=7", "is of type bool"),
        ("--steps=3", "no option --steps: a key of the config is set as in"),
        ("leftover", "not of the form --config.any.key=value"),
    ],
)
def test_a_bad_override_is_one_sentence(config_file, override, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        command_line.read(["train.py", "--config", config_file, override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "There is no config file"),
        ("def get_config(:", "SyntaxError"),
        ("x = 1", "it defines no get_config"),
        (CONFIG_FILE.replace("config.steps", "config.stepz"), "AttributeError"),
        (CONFIG_FILE.replace("= 7", "= 'seven'"), "TypeError"),
        ("def get_config(): return {}", "must return rlhf_jax.config.default()"),
        (
            "import ml_collections\ndef get_config(): return ml_collections.ConfigDict()",
            "no other keys",
        ),
    ],
)
def test_a_bad_config_file_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "config.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(words)) as caught:
        command_line.load(str(path))
    assert "\n" not in str(caught.value) and path.name in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "No config is named"),
        (["--config"], "--config needs a value"),
        (["--config.steps=3"], "No config is named"),
    ],
)
def test_a_config_must_be_named(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        command_line.read(["train.py", *arguments])


@pytest.mark.parametrize(
    ("override", "code"),
    [("--config.steps=9", 0), ("--config.stebs=9", 1), ("--config.steps=x", 1)],
)
def test_a_program_ends_without_a_traceback(config_file, override, code):
    command = [sys.executable, "-c", PROGRAM, "--config", config_file, override]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code
    assert len((done.stderr if code else done.stdout).strip().splitlines()) == 1


def test_a_micro_batch_is_given_in_tokens_or_in_samples(valid):
    longest = derived.text_tokens(valid)
    assert derived.microbatch_rows(valid) == valid.training.microbatch_rows
    valid.training.microbatch_tokens = 3 * longest + 1
    assert derived.microbatch_rows(valid) == 3
    validation.validate(valid, 8)
    settings = TrainingSettings.from_config(valid, ONE_DEVICE, remat=False)
    assert settings.extent.rows == 3


def test_a_valid_config_passes(valid):
    validation.validate(valid, 8)
    valid.update(generation={"strategy": "model-tree-2x2x1"}, drafter={"path": "small"})
    validation.validate(valid, 1)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("workdir", "", "workdir is empty"),
        ("steps", 0, "steps is 0; it must be above 0"),
        ("heartbeat_seconds", 4, "heartbeat_seconds is 4; it must lie in 5 .. 40"),
        ("seed", -1, "seed is -1"),
        ("model.path", "", "model.path is empty"),
        ("model.compute_dtype", "float16", "model.compute_dtype is 'float16'"),
        ("data.train", "", "data.train is empty"),
        ("data.train", "missing.jsonl", "data.train: there is no file missing.jsonl"),
        ("data.eval", "missing.jsonl", "data.eval: there is no file"),
        ("data.max_prompt_tokens", 0, "data.max_prompt_tokens is 0"),
        *(
            (key, value, f"{key} has half a character (a lone surrogate)")
            for key, value in (
                ("data.system", "a\ud800"),
                ("data.prompt_key", "\udfff"),
                ("data.template_arguments", {"date": "\ud800"}),
                ("data.template_arguments", {"\ud800": 1}),
                ("data.template_arguments", {"tools": [{"function": {"name": "\ud800"}}]}),
                ("data.columns", {"a": "\ud800"}),
                ("generation.stop_strings", ("a", "\ud800")),
                ("workdir", "run\udcff"),
                ("reward.functions", ("a\ud800",)),
                ("reward.metrics", {"a\ud800": "math_verify"}),
            )
        ),
        ("data.template_arguments", {1: 2}, "data.template_arguments has a name 1"),
        ("data.template_arguments", {"messages": []}, "which the run sets itself"),
        ("data.template_arguments", {"tools": "search"}, "tools is 'search'; it must be a list"),
        ("data.template_arguments", {"tools": ["search"]}, "it must be a list of objects"),
        ("data.template_arguments", {"documents": {"a": 1}}, "documents is {'a': 1}; it must be"),
        ("data.columns", {"a": "c", "b": "c"}, "data.columns renames two columns to 'c'"),
        ("data.mixture", ("b.jsonl",), "data.mixture[0]: there is no file"),
        ("data.shares", (1, 2), "data.shares is (1, 2); give one for data.train"),
        ("data.shares", (0,), "shares must be numbers above 0"),
        ("data.columns", {"a": 3}, "it must hold old and new names, none empty"),
        ("data.columns", {"a": ""}, "it must hold old and new names, none empty"),
        ("reward.functions", (), "reward.functions and reward.models are empty"),
        ("reward.functions", ("missing.py:reward",), "no file missing.py"),
        ("reward.functions", ("reward",), "must look like"),
        ("reward.functions", ("a.py:f", "b.py:f"), "rename one of the same name"),
        ("reward.weights", (1.0, 2.0), "has 2 entries for 1 functions and models"),
        ("reward.weights", ("much",), "must hold finite numbers"),
        ("reward.seconds", 0.0, "reward.seconds is 0.0"),
        ("reward.metrics", {"reward": "math:dist"}, "names a measure 'reward'"),
        ("generation.temperature", 0.0, "generation.temperature is 0.0"),
        ("generation.temperature", float("nan"), "generation.temperature is nan"),
        ("generation.top_p", 0.9, "is for evaluation"),
        ("generation.top_k", 65, "is for evaluation"),
        ("generation.acceptance", "greedy", "generation.acceptance is 'greedy'"),
        ("generation.strategy", "medusa", "Unknown strategy 'medusa'"),
        ("generation.strategy", "model-chain-4", "give drafter.path"),
        ("generation.repeated_noise", 5, "5 of 4 samples"),
        ("generation.samples_per_prompt", 1, "grpo compares"),
        ("training.microbatch_tokens", 5, "microbatch_tokens is 5, and a sample may have"),
        ("generation.max_rows", 12, "12 rows of generation.max_rows"),
        ("evaluation.top_p", 1.5, "evaluation.top_p is 1.5"),
        ("evaluation.temperature", -1.0, "evaluation.temperature is -1.0"),
        ("training.minibatches", 3, "32 samples of a step"),
        ("training.minibatches", 64, "minibatches = 64"),
        ("training.learning_rate", -1.0, "training.learning_rate is -1.0"),
        ("training.clip_low", 1.0, "training.clip_low is 1.0"),
        ("training.aggregate", "sum", "training.aggregate is 'sum'"),
        ("training.target_kl", -1.0, "training.target_kl is -1.0"),
        ("algorithm.estimator", "ppo", "algorithm.estimator is 'ppo'"),
        ("algorithm.gae_lambda", 1.5, "algorithm.gae_lambda is 1.5"),
        ("algorithm.estimator", "gae", "choose algorithm 'ppo'"),
        ("algorithm.loss", "pppo", "must be one of ppo"),
        ("critic.path", "folder", "has no critic"),
        ("kl.coefficient", -0.1, "kl.coefficient is -0.1"),
        ("kl.coefficient", float("inf"), "kl.coefficient is inf"),
        ("kl.place", "both", "kl.place is 'both'"),
        ("kl.estimator", "k1", "its gradient has mean zero"),
        ("kl.horizon", 31, "less than the 32 samples of a step"),
        ("checkpoint.keep", 0, "checkpoint.keep is 0"),
        ("checkpoint.every", -1, "checkpoint.every is -1"),
        ("checkpoint.best", "reward/mean", "it must be a measure of evaluations"),
        ("checkpoint.best", "eval/reward", "'eval/reward', but evaluation.every is 0"),
        ("stop_at", "reward/mean = 1", "stop_at is 'reward/mean = 1'; it must be"),
        ("stop_at", "reward/mean > 1.2.3", "stop_at is 'reward/mean > 1.2.3'; it must be"),
        ("stop_at", "reward/men > 1", "stop_at names 'reward/men', which no run measures"),
        ("stop_at", "eval/exact >= 1", "'eval/exact', but evaluation.every is 0"),
        ("mesh.fsdp", 3, "choose sizes whose product is 8, as by mesh.fsdp=-1."),
    ],
)
def test_what_cannot_work_is_one_sentence(valid, key, value, words):
    section, _, name = key.rpartition(".")
    target = valid[section] if section else valid
    target[name] = value
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(words)) as caught:
        validation.validate(valid, 8)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_processes_share_slices_evenly(valid):
    valid.mesh.update(slices=2, fsdp=-1)
    validation.validate(valid, 8, 2)
    validation.validate(valid, 8, 4)
    with pytest.raises(
        ValueError, match=r"3 processes that generate cannot share them evenly: set it to"
    ):
        validation.validate(valid, 8, 3)


def test_evaluation_needs_held_out_prompts(valid):
    valid.evaluation.every = 5
    valid.data.eval = ""
    with pytest.raises(ValueError, match=r"data\.eval is empty"):
        validation.validate(valid, 8)


def test_a_run_may_end_at_what_it_measures(valid):
    valid.evaluation.every = 5
    valid.reward.metrics = {"exact": valid.reward.functions[0]}
    valid.checkpoint.best = "eval/exact"
    for condition in ("eval/exact/seen>=0.5", "reward/length/mean < -1e3", "eval/finished >= 1"):
        valid.stop_at = condition
        validation.validate(valid, 8)
    valid.stop_at = "eval/exat > 1"
    with pytest.raises(ValueError, match=r"those of an evaluation are .* eval/exact\.$"):
        validation.validate(valid, 8)
    stop = StopAt("eval/exact >= 0.5")
    assert stop.after_evaluation(3, {"eval/exact": 0.5})
    assert not stop.after_evaluation(3, {"eval/exact": 0.4})
    assert not stop.after_step(3, {"reward/mean": 1.0})


def test_options_that_contradict_each_other(valid):
    valid.kl.update(coefficient=0.0, target=1.0)
    with pytest.raises(ValueError, match=r"kl\.coefficient is 0 and would stay there"):
        validation.validate(valid, 8)
    valid.kl.update(coefficient=0.1)
    valid.algorithm.name = "ppo"
    valid.generation.update(prompts_per_step=32, samples_per_prompt=1, resample=1)
    with pytest.raises(ValueError, match="one sample of a prompt never differs"):
        validation.validate(valid, 8)
    valid.generation.resample = 0
    validation.validate(valid, 8)


def test_prompt_and_response_must_fit_all_contexts(valid, tiny: ModelConfig):
    roomy = dataclasses.replace(tiny, max_context=384)
    with pytest.raises(ValueError, match="the drafter's context is 128"):
        sample_checks.check_models(valid, ModelConfigs(roomy, drafter=tiny))
    with pytest.raises(ValueError, match="the critic's context is 128"):
        sample_checks.check_models(valid, ModelConfigs(roomy, critics={"critic": tiny}))
    with pytest.raises(ValueError, match=r"is 384, but the model's context is 128"):
        sample_checks.check_models(valid, ModelConfigs(tiny))
    valid.data.max_prompt_tokens = 64
    valid.generation.max_new_tokens = 64
    sample_checks.check_models(valid, ModelConfigs(tiny))


def test_models_must_be_of_the_right_kind(valid, tiny: ModelConfig):
    valid.data.max_prompt_tokens = 64
    valid.generation.max_new_tokens = 64
    scorer = dataclasses.replace(tiny, scalar_head=True, tied=False)
    valid.reward.models = ("judge",)
    sample_checks.check_models(
        valid, ModelConfigs(tiny, critics={"critic": scorer}, rewards=(scorer,))
    )
    with pytest.raises(ValueError, match="judge is a language model"):
        sample_checks.check_models(valid, ModelConfigs(tiny, rewards=(tiny,)))
    for models in (
        ModelConfigs(scorer, rewards=(scorer,)),
        ModelConfigs(tiny, scorer, rewards=(scorer,)),
    ):
        with pytest.raises(ValueError, match="path is a reward model"):
            sample_checks.check_models(valid, models)


def test_vocabularies_must_agree_where_tokens_are_shared(valid, tiny: ModelConfig):
    valid.data.max_prompt_tokens = 64
    valid.generation.max_new_tokens = 64
    other = dataclasses.replace(tiny, vocab_size=321)
    sample_checks.check_models(valid, ModelConfigs(tiny, drafter=other))
    valid.generation.acceptance = "rejection"
    with pytest.raises(ValueError, match="has 321 tokens, the model's 320"):
        sample_checks.check_models(valid, ModelConfigs(tiny, drafter=other))
    fewer = dataclasses.replace(tiny, vocab_size=319)
    for models in (
        ModelConfigs(tiny, critics={"critic": fewer}),
        ModelConfigs(tiny, reference=fewer),
    ):
        with pytest.raises(ValueError, match="has a vocabulary of 319"):
            sample_checks.check_models(valid, models)


def test_a_config_may_take_an_argument():
    path = str(ROOT / "configs" / "grpo_llama31_8b.py")
    assert command_line.load(path).mesh.fsdp == command_line.load(f"{path}:gpu").mesh.fsdp == 4
    assert command_line.load(f"{path}:tpu").mesh.fsdp == 2
    with pytest.raises(ValueError, match="KeyError: 'abacus'"):
        command_line.load(f"{path}:abacus")


@pytest.mark.parametrize("change", [{"repeated_noise": 1}, {"strategy": "replay-chain-4"}], ids=str)
def test_rejection_and_replay_are_refused_together(valid, change):
    valid.generation.update(acceptance="rejection", **change)
    with pytest.raises(ValueError, match="cannot be replayed"):
        validation.validate(valid, 8)


NO_TEXTS = (5, None, b"a", 1.5, ("a",))
WRONG_NAMES = [
    *((key, (wrong,)) for key in checks.NAMING_KEYS for wrong in NO_TEXTS),
    *((key, {5: "math_verify"}) for key in configs.DICTS),
]


@pytest.mark.parametrize(("key", "value"), WRONG_NAMES)
def test_names_are_texts(key, value):
    """In every place where a config names something, before anything looks for it."""
    config = default()
    section, _, name = key.rpartition(".")
    (config[section] if section else config)[name] = value
    with pytest.raises(ValueError, match=f"^{re.escape(key)} has .*; give a text"):
        validation.validate(config, 1)


@pytest.mark.parametrize("name", [5, None, b"a"])
def test_measures_are_named_by_texts(valid, name):
    valid.reward.metrics = {"kind": name}
    with pytest.raises(ValueError, match=r"reward\.metrics has for 'kind' .*; give a text"):
        validation.validate(valid, 8)


@pytest.mark.parametrize("name", [*OWN_MEASURES, "", "kind/failed"])
def test_measures_hide_nothing_of_the_runs_own(valid, name):
    valid.reward.metrics = {name: "think_format"}
    with pytest.raises(ValueError, match=r"names a measure .* rename it"):
        validation.validate(valid, 8)
