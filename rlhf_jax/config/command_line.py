"""Read the command line into a config, every mistake in one sentence."""

from __future__ import annotations

import difflib
import operator
import pathlib
import re
import runpy

from absl import flags
from ml_collections import config_flags

from rlhf_jax.config.schema import Config, default, keys
from rlhf_jax.runtime.distributed import Place

# What a key that was renamed is called now.
RENAMED = {
    "generation.rows": "generation.max_rows",
    "generation.fewest_rows": "generation.min_rows",
}
USAGE = "python launch/train.py --config FILE[:ARGUMENT] --config.any.key=value"
PLACE_FLAGS = ("--coordinator", "--processes", "--process")


def read(argv: list[str]) -> Config:
    """Return the config of `--config FILE[:ARGUMENT] --config.any.key=value ...`.

    argv[0] is the program's name. Raises ValueError or FileNotFoundError in one sentence: no file,
    a file that fails, an unknown key or a value of another type. Whether the values make sense is
    the question of `validation.validate`.
    """
    path, overrides = _split(argv[1:])
    config = load(path)
    for argument in overrides:
        _override(config, argument)
    return config


def place(argv: list[str]) -> tuple[Place, list[str]]:
    """Return where this process stands among several, and the command line without those flags.

    The flags are `--coordinator HOST:PORT --processes N --process I`, or `--processes auto` where
    the cluster knows. Raises ValueError in one sentence.
    """
    found = {}
    rest = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name in PLACE_FLAGS:
            found[name] = value if equals else next(words, "")
        else:
            rest.append(word)
    if not found:
        return Place(), rest
    if found == {"--processes": "auto"}:
        return Place(None, None, None), rest
    numbers = [found.get(name, "") for name in PLACE_FLAGS[1:]]
    if (
        set(found) != set(PLACE_FLAGS)
        or not all(map(str.isdigit, numbers))
        or not 0 <= int(numbers[1]) < int(numbers[0])
    ):
        raise ValueError(
            "Several processes are told --coordinator HOST:PORT --processes N --process I, with I"
            " from 0 to N - 1, or --processes auto."
        )
    return Place(found["--coordinator"], *map(int, numbers)), rest


def load(spec: str) -> Config:
    """Return the locked config that get_config() of the Python file FILE returns.

    Of FILE:ARGUMENT it is get_config(ARGUMENT). Raises ValueError or FileNotFoundError in one
    sentence where the file is missing, fails or returns other keys.
    """
    path, colon, word = spec.rpartition(":")
    argument = (word,)
    if not colon or not path.endswith(".py"):
        path = spec
        argument = ()
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"There is no config file {path} (usage: {USAGE}).")
    try:
        config = runpy.run_path(path)["get_config"](*argument)
    except Exception as error:  # a config file is Python and may raise anything
        lines = str(error).strip().splitlines() or ["no message"]
        reason = lines[0].rstrip(".")
        raise ValueError(f"Config {spec} fails: {type(error).__name__}: {reason}.") from error
    if not isinstance(config, Config) or keys(config) != keys(default()):
        raise ValueError(
            f"Config {spec}: get_config() must return rlhf_jax.config.default() with other values"
            " and no other keys."
        )
    config.lock()
    return config


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the config's path, from `--config FILE` or `--config=FILE`, and other arguments."""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--config", "-config") and equals:
            return value, arguments[:place] + arguments[place + 1 :]
        if name in ("--config", "-config") and place + 1 < len(arguments):
            return arguments[place + 1], arguments[:place] + arguments[place + 2 :]
    raise ValueError(f"No config file is named (usage: {USAGE}).")


def _override(config: Config, argument: str) -> None:
    """Set the value that `--config.any.key=value` gives, of the type that the key has."""
    match = re.fullmatch(r"--?config\.([^=]+)=(.*)", argument, re.DOTALL)
    if match is None:
        raise ValueError(
            f"Argument {argument!r} is not of the form --config.any.key=value (usage: {USAGE})."
        )
    name, text = match.groups()
    known = keys(config)
    if name not in known:
        near = [RENAMED[name]] if name in RENAMED else []
        near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "rlhf_jax/config/schema.py lists them all."
        raise ValueError(f"There is no config key {name!r}; {hint}")
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=[argument])
    try:
        values(["", argument])
    except (flags.Error, TypeError, ValueError) as error:
        wanted = type(operator.attrgetter(name)(config)).__name__
        raise ValueError(f"Config key {name!r} is of type {wanted}; {text!r} is not.") from error
