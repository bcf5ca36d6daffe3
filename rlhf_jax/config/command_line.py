"""Read the command line into a config; every mistake is reported in one sentence."""

from __future__ import annotations

import difflib
import operator
import pathlib
import re
import runpy
from typing import Any
from typing import cast as typed

from absl import flags
from ml_collections import config_flags

from rlhf_jax.config import default
from rlhf_jax.config.checks import require_texts
from rlhf_jax.config.earlier import settled
from rlhf_jax.config.schema import EARLIER, Config, flat
from rlhf_jax.runtime.extensions import is_of_file
from rlhf_jax.runtime.files import SHIPPED, find
from rlhf_jax.runtime.joining import Place

# The current names of renamed keys.
RENAMED = {
    "generation.rows": "generation.max_rows",
    "generation.fewest_rows": "generation.min_rows",
}
USAGE = "rlhf-jax train CONFIG[:ARGUMENT] --config.any.key=value"
BEGIN = (
    "begin with rlhf-jax train quickstart, where a small model learns to write JSON in minutes, or"
    " with rlhf-jax train --model DIR --prompts FILE.jsonl --reward FILE.py:function; see also"
    " --help."
)
# Short flags by the key that each sets; a run without a config needs the first three.
NAMED_FLAGS = {
    "--model": "model.path",
    "--prompts": "data.train",
    "--reward": "reward.functions",
    "--profile": "profile",
}
# Keys whose values are paths or lists of paths, besides those of FILE.py:NAME.
PATH_KEYS = (
    "model.path",
    "drafter.path",
    "critic.path",
    "kl.reference",
    "data.train",
    "data.eval",
    "data.mixture",
    "reward.functions",
    "reward.models",
    "reward.preference_models",
    "plan",
)
PLACE_FLAGS = ("--coordinator", "--processes", "--process")


def read(argv: list[str]) -> Config:
    """Return the config of `[--config] CONFIG --config.any.key=value ...`.

    argv[0] is the program's name. CONFIG is an argument of `load`; it may be left out with
    `--model`. `--model DIR`, `--prompts FILE` and `--reward FILE.py:function` set the keys that
    each run needs. Raises ValueError or FileNotFoundError in one sentence for a missing or failing
    file, an unknown key or a value of another type. `validation.validate` checks the values
    themselves.
    """
    spec, named, overrides = _split(argv[1:])
    if not spec and "--model" not in named:
        raise ValueError(f"No config is named: {BEGIN}")
    config = load(spec) if spec else default()
    first = []
    for flag, value in named.items():
        given = f"({value!r},)" if flag == "--reward" else value
        first.append(f"--config.{NAMED_FLAGS[flag]}={given}")
    # The algorithm first, as its options are keys.
    names = ("algorithm.name", *EARLIER)
    early = [one for one in overrides if one.partition("=")[0].lstrip("-")[7:] in names]
    _override(config, early)
    config = settled(config)
    _override(config, first + [one for one in overrides if one not in early])
    return config


def place(argv: list[str]) -> tuple[Place, list[str]]:
    """Return the place of this process among several, and the command line without those flags.

    The flags are `--coordinator HOST:PORT --processes N --process I`, or `--processes auto` if the
    cluster provides them. Raises ValueError in one sentence.
    """
    flags_given = {}
    rest = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name in PLACE_FLAGS:
            flags_given[name] = value if equals else next(words, "")
        else:
            rest.append(word)
    if not flags_given:
        return Place(), rest
    if flags_given == {"--processes": "auto"}:
        return Place(None, None, None), rest
    numbers = [flags_given.get(name, "") for name in PLACE_FLAGS[1:]]
    if (
        set(flags_given) != set(PLACE_FLAGS)
        or not all(map(str.isdigit, numbers))
        or not 0 <= int(numbers[1]) < int(numbers[0])
    ):
        raise ValueError(
            "Several processes need --coordinator HOST:PORT --processes N --process I, with I"
            " from 0 to N - 1, or --processes auto."
        )
    return Place(flags_given["--coordinator"], *map(int, numbers)), rest


def load(spec: str) -> Config:
    """Return the locked config that get_config() of the Python file FILE returns.

    FILE:ARGUMENT calls get_config(ARGUMENT). A name without .py is a config of the package. A file
    named in the config is looked up in the current folder, then next to the config. Raises
    ValueError or FileNotFoundError in one sentence if the file is missing, fails or returns other
    keys. It may have keys of earlier versions, which `read` translates.
    """
    name, colon, word = spec.rpartition(":")
    if not colon or spec.endswith(".py"):
        name = spec
        word = ""
    path = find(name if name.endswith(".py") else f"configs/{name}.py")
    if not path.is_file():
        shipped = sorted(each.stem for each in (SHIPPED / "configs").glob("*.py"))
        raise FileNotFoundError(
            f"There is no config file {name} (usage: {USAGE}); by name there are"
            f" {', '.join(shipped)}."
        )
    try:
        module = runpy.run_path(str(path))
        if not word and "STAGES" in module:
            raise ValueError(f"it is a workflow; run it by rlhf-jax workflow {spec}")
        if "get_config" not in module:
            raise ValueError("it defines no get_config()")
        config = module["get_config"](*([word] if word else []))
    except (Exception, SystemExit) as error:  # a config file is Python and may raise anything
        lines = str(error).strip().splitlines() or ["no message"]
        reason = lines[0].rstrip(".")
        raise ValueError(f"Config {spec} fails: {type(error).__name__}: {reason}.") from error
    # The options of an algorithm are checked once the algorithm is known.
    known, found = (
        {key for key in flat(one) if not re.match(r"algorithm\.(?!name)", key)}
        for one in (default(), config if isinstance(config, Config) else Config())
    )
    if known != found:
        raise ValueError(
            f"Config {spec}: get_config() must return rlhf_jax.config.default() with other values"
            " and no other keys."
        )
    require_texts(config)
    _locate_files(config, path.resolve().parent)
    config.lock()
    return config


def _locate_files(config: Config, folder: pathlib.Path) -> None:
    """Replace names of missing files by paths next to the config, if the files are there."""

    def located(name: str) -> str:
        file, colon, function = name.partition(".py:")
        path = file + colon.removesuffix(":")
        if not name or find(path).exists() or not (folder / path).exists():
            return name
        return f"{folder / path}{':' * bool(colon)}{function}"

    located_values = {}
    for name, value in flat(config).items():
        several = value if isinstance(value, (tuple, list)) else (value,)
        if name in PATH_KEYS or any(isinstance(one, str) and is_of_file(one) for one in several):
            located_values[name] = (
                located(value) if isinstance(value, str) else tuple(map(located, value))
            )
    config.update_from_flattened_dict(located_values)
    for name, spec in config.reward.metrics.items():
        config.reward.metrics[name] = located(spec)


def _split(arguments: list[str]) -> tuple[str, dict[str, str], list[str]]:
    """Return the config's name ('' if none), the flags of NAMED_FLAGS, and other arguments."""
    spec = ""
    named = {}
    rest = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in ("--config", "-config") or flag in NAMED_FLAGS:
            value = value if equals else next(words, "")
            if not value:
                raise ValueError(f"{flag} needs a value (usage: {USAGE}).")
            if flag in NAMED_FLAGS:
                named[flag] = value
            else:
                spec = value
        elif not re.match("--?config[.]", word) and word.startswith("-"):
            raise ValueError(
                f"There is no option {flag}: a key of the config is set as in"
                " --config.training.learning_rate=1e-5, and 'rlhf-jax config WORD' finds keys."
            )
        elif not word.startswith("-") and not spec:
            spec = word
        else:
            rest.append(word)
    return spec, named, rest


def _override(config: Config, arguments: list[str]) -> None:
    """Set the values that `--config.any.key=value ...` give, in the type of each key.

    Only the last value of a key is passed on, since tuples would be concatenated.
    """
    known = {*flat(config), *EARLIER}
    last = dict(_key_and_text(argument, known) for argument in arguments)
    last_arguments = {name: f"--config.{name}={text}" for name, text in last.items()}
    values = flags.FlagValues()
    typed_config = typed(Any, config)  # a ConfigDict
    config_flags.DEFINE_config_dict(
        "config", typed_config, flag_values=values, sys_argv=[*last_arguments.values()]
    )
    for name, argument in last_arguments.items():
        wanted = type(operator.attrgetter(name)(config)).__name__
        try:
            values(["", argument])
        except (flags.Error, TypeError, ValueError) as error:
            raise ValueError(
                f"Config key {name!r} is of type {wanted}; {last[name]!r} is not."
            ) from error


def _key_and_text(argument: str, known: set[str]) -> tuple[str, str]:
    """Return the key and the text of `--config.any.key=value`."""
    match = re.fullmatch(r"--?config\.([^=]+)=(.*)", argument, re.DOTALL)
    if match is None:
        raise ValueError(
            f"Argument {argument!r} is not of the form --config.any.key=value (usage: {USAGE})."
        )
    name, text = match.groups()
    if name not in known:
        near = [RENAMED[name]] if name in RENAMED else []
        # The name of a key within its section; the policy's section comes before a critic's.
        within = [key for key in known if key.rpartition(".")[2] == name]
        near = near or sorted(within, key=lambda key: (not key.startswith("training."), key))
        near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "'rlhf-jax config' lists them all."
        raise ValueError(f"There is no config key {name!r}; {hint}")
    return name, text
