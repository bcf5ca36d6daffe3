"""Rewards: loading them, running them in processes that may fail, sums of several, and those that
are shipped.
"""

import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from offspring import ended

from rlhf_jax.config import default as default_config
from rlhf_jax.rewards import combination, sources
from rlhf_jax.rewards import workers as reward_worker
from rlhf_jax.rewards.combination import Response, Score, Term, as_scores, weighted
from rlhf_jax.rewards.functions import Form, Signature
from rlhf_jax.rewards.workers import Workers

SENTIMENT = "configs/rewards/sentiment.py"
ARITHMETIC = "configs/rewards/arithmetic.py:gsm8k"

MISCHIEF = """
import os, re, subprocess, sys, time

def mischief(prompt, response, row):
    match response:
        case "raise":
            raise RuntimeError("two\\nlines")
        case "text":
            return "0.5"
        case "hang":
            time.sleep(60)
        case "regex":  # never ends, and holds the interpreter's lock
            re.fullmatch("(a+)+b", "a" * 60)
        case "chatter":
            print("x" * 10_000)
            os.write(1, b"y" * 10_000)
            return float(sys.stdin.read() == "")
        case "column":
            return row["answer"]
        case "jax":
            return float("jax" in sys.modules)
        case "pid":
            return float(os.getpid())
        case "offspring":
            return float(subprocess.Popen(["sleep", "60"]).pid)
    return float(response) * row.get("scale", 1)

def slow_first(prompt, response, row):
    time.sleep(0.2 if response == "0" else 0)
    return float(response)

def never(prompt, response, row):
    time.sleep(60)
"""


def test_loads_from_a_module_and_from_a_file(tmp_path, monkeypatch):
    assert combination.load_reward("math:dist").__name__ == "dist"
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass Scale:\n    by: float = 2.0\n"
        "def scaled(prompt, response, row):\n    return Scale().by * len(response)\n"
    )
    monkeypatch.chdir(tmp_path)
    for spec in ("mine.py:scaled", f"{tmp_path}/mine.py:scaled"):
        assert combination.load_reward(spec)("", "abc", {}) == 6.0
    assert combination.load_reward(f"{SENTIMENT}:vader")  # found in the repository from any folder


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("sentiment", "must look like"),
        ("file.py:", "must look like"),
        ("nowhere/file.py:f", "there is no file nowhere/file.py"),
        ("no_such_package.module:f", "cannot be imported: ModuleNotFoundError"),
        ("math:no_such", "defines no 'no_such'"),
        ("math:pi", "is of type float, not a function"),
        ("broken.py:f", "cannot be imported: SyntaxError"),
    ],
)
def test_bad_specs_end_in_one_sentence(spec, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as caught:
        combination.load_reward(spec)
    assert "\n" not in str(caught.value)


def answers(*responses, **row):
    return [
        Response("p", [{"role": "user", "content": "p"}], row, response) for response in responses
    ]


@pytest.fixture(scope="module")
def mischief(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mischief.py"
    path.write_text(MISCHIEF)
    return path


@pytest.fixture
def workers(mischief):
    with Workers(f"{mischief}:mischief", 2, 20.0) as pool:
        yield pool


def test_scores_come_in_the_order_of_the_answers(mischief):
    with Workers(f"{mischief}:slow_first", 2, 20.0) as pool:
        scores = pool(answers(*map(str, range(9))))
    assert scores.values.dtype == np.float32 and scores.values.tolist() == list(range(9))
    assert scores.failures == {}


def test_processes_are_kept_between_calls_and_see_the_row(workers):
    first = set(workers(answers("pid", "pid", "pid")).values)
    assert 1 <= len(first) <= 2 and os.getpid() not in first
    assert set(workers(answers("pid")).values) <= first
    assert workers(answers("3", "4", scale=2)).values.tolist() == [6.0, 8.0]
    assert workers([]).values.shape == (0,)


def test_a_process_needs_no_jax_and_what_it_prints_is_harmless(mischief, capfd):
    with Workers(f"{mischief}:mischief", 2, 20.0) as workers:
        assert workers(answers("jax", "chatter", "7")).values.tolist() == [0.0, 1.0, 7.0]
    out, err = capfd.readouterr()
    assert not out and err.count("x") >= 10_000 and err.count("y") >= 10_000


def test_a_reward_that_fails_on_everything_is_refused(workers):
    with pytest.raises(
        ValueError,
        match=r"mischief failed on all 2 answers; the first one raised RuntimeError: two lines\.$",
    ):
        workers(answers("raise", "text"))


def test_a_column_that_a_row_lacks_is_told_with_those_it_has(workers):
    found = workers(answers("7", "column", scale=2, name="b"))
    assert found.failures == {1: "raised KeyError: 'answer' (the row has 'scale', 'name')"}


def test_a_reward_that_hangs_is_refused_early(mischief):
    start = time.monotonic()
    with (
        Workers(f"{mischief}:never", 2, 0.3) as pool,
        pytest.raises(ValueError, match="hangs: 4 calls took longer"),
    ):
        pool(answers(*"0123456789" * 10))
    assert time.monotonic() - start < 10


def test_a_reward_that_has_worked_may_fail_on_everything(workers):
    workers(answers("raise", "1"))
    scores = workers(answers("raise", "nan"))
    assert np.isnan(scores.values).all() and list(scores.failures) == [0, 1]


def test_a_reward_that_has_worked_may_hang_on_everything(mischief):
    hanging = answers(*["hang"] * reward_worker.HANGS)
    with Workers(f"{mischief}:mischief", 2, 0.5) as pool:
        pool(answers("1"))
        scores = pool(hanging)
        assert scores.failures == dict.fromkeys(range(len(hanging)), "took longer than 0.5 s")
        assert np.isnan(scores.values).all() and pool(answers("2")).values.tolist() == [2.0]


def test_a_long_call_without_a_limit_gives_signs_of_life(mischief, monkeypatch):
    monkeypatch.setattr(reward_worker, "SILENCE", 0.02)
    signs = []
    with Workers(
        f"{mischief}:slow_first", 1, math.inf, lambda: signs.append(time.monotonic())
    ) as pool:
        pool(answers("1"))
        signs.clear()
        assert pool(answers("0")).values.tolist() == [0.0] and len(signs) >= 3
        signs.clear()
        pool(answers(*"123456"))
        assert len(signs) >= 6  # one after each result of the one process


def test_whoever_observes_may_stop_a_call(mischief):
    stop = []

    def observe():
        if stop:
            raise InterruptedError

    with Workers(f"{mischief}:mischief", 1, math.inf, observe) as pool:
        pid = int(pool(answers("pid")).values[0])
        stop.append(True)
        start = time.monotonic()
        with pytest.raises(InterruptedError):
            pool(answers("hang"))
        assert ended(pid) and time.monotonic() - start < 10
        stop.clear()
        assert pool(answers("1")).values.tolist() == [1.0]


def test_a_reward_is_imported_by_processes_alone(tmp_path):
    (tmp_path / "tells.py").write_text(
        f"import pathlib, os\npathlib.Path('{tmp_path}', str(os.getpid())).touch()\n"
        "async def f(prompt, responses, row):\n    return [1.0]\n"
    )
    config = default_config()
    config.reward.functions = (f"{tmp_path}/tells.py:f",)
    sources.check_sources(config)
    importers = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(importers) == 1 and importers != [os.getpid()] and ended(importers[0])
    with Workers(f"{tmp_path}/tells.py:f", 2, 20.0) as pool:
        assert pool.signature() == Signature(Form.GROUP, True)
        assert pool(answers("1")).values.tolist() == [1.0]


def test_a_reward_that_imports_only_here_is_refused(tmp_path):
    (tmp_path / "fussy.py").write_text(
        "import sys\nsys.modules['pytest']\ndef f(*_):\n    return 1.0\n"
    )
    spec = f"{tmp_path}/fussy.py:f"
    with Workers(spec, 1, 20.0) as pool, pytest.raises(ValueError) as caught:
        pool(answers("1"))
    assert str(caught.value) == f"Reward {spec!r} cannot be imported: KeyError: 'pytest'."


@pytest.mark.parametrize(
    ("begin", "sentence"),
    [
        ("time.sleep(60)", "it was not imported within 2 s; import less, or raise reward.seconds."),
        ("re.fullmatch('(a+)+b', 'a' * 60)", "it was not imported within 2 s; import less"),
        ("os._exit(0)", "it ended its process with exit code 0."),
        ("os.kill(os.getpid(), 11)", "it ended its process with signal SIGSEGV."),
        ("sys.exit(0)", "cannot be imported: SystemExit: 0."),
        ("raise OSError('two\\nlines')", "cannot be imported: OSError: two lines."),
    ],
    ids=["sleep", "regex", "exit", "crash", "sys.exit", "error"],
)
def test_whatever_the_import_of_a_reward_does_is_one_sentence(begin, sentence, tmp_path):
    (tmp_path / "bad.py").write_text(
        f"import os, re, sys, time\n{begin}\ndef f(*_):\n    return 1.0\n"
    )
    start = time.monotonic()
    with Workers(f"{tmp_path}/bad.py:f", 1, 0.1) as pool, pytest.raises(ValueError) as caught:
        pool.signature()
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("Reward ") and time.monotonic() - start < 15


def test_checked_rewards_are_imported_at_one_time(tmp_path):
    """Each waits for all others to be imported, too."""
    (tmp_path / "waits.py").write_text(
        "import pathlib, sys, time\n"
        f"here = pathlib.Path('{tmp_path}')\n"
        "(here / sys.argv[1][-1]).touch()\n"
        "while not all((here / name).exists() for name in 'abc'):\n    time.sleep(0.01)\n"
        "def a(*_): return 1.0\ndef b(*_): return 1.0\ndef c(*_): return 1.0\n"
    )
    config = default_config()
    config.reward.functions = (f"{tmp_path}/waits.py:a", f"{tmp_path}/waits.py:b")
    config.reward.metrics = {"other": f"{tmp_path}/waits.py:c"}
    sources.check_sources(config)


FORKS = """
import os, asyncio

def forks(prompt, response, row):
    if response == "pid":
        return float(os.getpid())
    if os.fork() == 0 and response == "raise":
        raise SystemExit
    return float(response) if response != "raise" else 3.0

async def forks_async(prompt, response, row):
    await asyncio.sleep(0.01)
    return forks(prompt, response, row)
"""


@pytest.mark.parametrize("name", ["forks", "forks_async"])
def test_a_reward_that_forks_answers_once(name, tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    with Workers(f"{tmp_path}/forks.py:{name}", 1, 20.0, concurrency=4) as pool:
        asked = ["pid", *map(str, range(40)), "raise", "pid"]
        for _ in range(2):
            scores = pool(answers(*asked))
            assert scores.failures == {}
            assert scores.values[1:-1].tolist() == [*map(float, range(40)), 3.0]
            assert scores.values[0] == scores.values[-1], "no process was replaced"


def test_replies_that_nobody_took_in_time_are_not_late(tmp_path, monkeypatch):
    """Whoever asks may be away for longer than a call may take, compiling."""
    monkeypatch.setattr(reward_worker, "GRACE", 0.0)
    (tmp_path / "quick.py").write_text("async def f(prompt, response, row):\n    return 1.0\n")
    with Workers(f"{tmp_path}/quick.py:f", 1, 1.0, concurrency=8) as pool:
        for key in range(8):
            pool.begin(key, answers("1")[0], (key,))
        pool.advance()
        time.sleep(1.5)
        assert pool.collect() == dict.fromkeys(range(8), Score(1.0))


def test_a_reward_that_forks_when_it_is_imported_is_ready_once(tmp_path):
    (tmp_path / "forks.py").write_text("import os\nos.fork()\ndef f(*_):\n    return 1.0\n")
    with Workers(f"{tmp_path}/forks.py:f", 1, 20.0) as pool:
        assert pool(answers(*"12345")).values.tolist() == [1.0] * 5


def test_processes_import_what_this_one_can(tmp_path, monkeypatch):
    (tmp_path / "only_on_the_path.py").write_text("def f(*_):\n    return 5.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Workers("only_on_the_path:f", 1, 20.0) as pool:
        assert pool(answers("")).values.tolist() == [5.0]


def test_a_process_that_died_idle_costs_nothing(workers):
    for pid in set(workers(answers("pid", "pid")).values.astype(int)):
        os.kill(pid, signal.SIGKILL)
        assert ended(pid)
    assert workers(answers("1", "2")).values.tolist() == [1.0, 2.0]


def test_nothing_of_an_interrupted_call_reaches_the_next(workers, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    workers(answers("0", "0"))
    with monkeypatch.context() as patch:
        patch.setattr(reward_worker.connection, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            workers(answers("8", "9"))
    assert workers(answers("1", "2")).values.tolist() == [1.0, 2.0]


def test_leaving_ends_processes_and_their_offspring(mischief):
    with Workers(f"{mischief}:mischief", 1, 20.0) as pool:
        pids = pool(answers("pid", "offspring")).values.astype(int)
    assert all(ended(pid) for pid in pids)


@pytest.mark.parametrize("last", ["hang", "regex", "1"])
def test_processes_end_with_a_parent_that_is_killed(mischief, last):
    """In the middle of a call, even one that lets no other thread run, and between calls."""
    program = (
        "import sys, time\nfrom rlhf_jax.rewards.combination import Response\n"
        "from rlhf_jax.rewards.workers import Workers\n"
        "pool = Workers(sys.argv[1], 1, 60.0)\n"
        "print(int(pool([Response('', [], {}, 'pid')]).values[0]), flush=True)\n"
        "pool([Response('', [], {}, sys.argv[2])])\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, f"{mischief}:mischief", last]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.3)  # for the second call to begin
        assert not ended(pid, patience=0.1)
        parent.kill()
    assert ended(pid)


def test_weighted_sum_with_the_metrics_of_each_term():
    def scorer(*results):
        return lambda answers: as_scores(results)

    terms = [
        Term("one", 2.0, scorer(1.0, "hangs", 3.0)),
        Term("two", -0.5, scorer(2.0, "raised", "raised")),
    ]
    scores, metrics = weighted(terms, answers("a", "b", "c"))
    assert (
        scores.values.dtype == np.float32
        and scores.values[0] == 1.0
        and np.isnan(scores.values[1:]).all()
    )
    assert scores.failures == {1: "one hangs", 2: "two raised"}
    assert metrics == {
        "reward/one/mean": 2.0,
        "reward/one/failed": 1.0,
        "reward/two/mean": 2.0,
        "reward/two/failed": 2.0,
    }


def test_a_term_that_fails_on_all_has_no_mean():
    terms = [Term("one", 1.0, lambda answers: as_scores(["hangs", math.nan]))]
    scores, metrics = weighted(terms, answers("a", "b"))
    assert np.isnan(scores.values).all() and list(scores.failures) == [0, 1]
    assert metrics == {"reward/one/failed": 2.0}


@pytest.fixture(scope="module")
def gsm8k():
    return lambda response, answer: combination.load_reward(ARITHMETIC)(
        "", response, {"answer": answer}
    )


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("She pays 3 * 6 = $18.", "9 + 9 = 18\n#### 18"),
        ("#### 1,234", "#### 1234"),
        ("#### 1234.00", "1,234"),
        ("It costs $1,000,000.50 in all.", 1000000.5),
        ("#### $-5", "-5"),
        ("-$5", "-5"),
        ("−7", "-7"),
        ("So 10-5", "5"),  # a subtraction, not a sign
        ("f(3)-4", "4"),
        ("The answer is 42. ", "42"),
        ("It rose by 25%", "25"),
        ("\\boxed{25\\%} of 400", "25"),
        ("\\boxed{\\$1{,}250}", "1250"),
        ("$1\\,250$", "1250"),
        ("\\boxed{x = \\text{about } 6}. I checked 7 cases.", "6"),
        ("\\boxed{\\frac{1}{2}} or 50 percent", "0.5"),
        ("-\\dfrac{3}{4}", "-0.75"),
        ("First \\boxed{3}, no: \\boxed{4}", "4"),
        ("#### 3\nWait.\n#### 4 apples for 2 children", "#### 4"),
        ("#### 9\n\\boxed{4}", "4"),
        ("1/3", "1/3"),
        ("It is .5", "0.5"),
        ("1e3", "1000"),
        ("The total is 8.\n####", "8"),  # cut off
        ("\\boxed{12", "12"),
        ("8 H2O", "8"),
        ("\\boxed{x_1 = 5}", "5"),
    ],
)
def test_arithmetic_finds_the_right_number(gsm8k, response, answer):
    assert gsm8k(response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("", "5"),
        ("five", "5"),
        ("5 or 6", "5"),
        ("#### 6, or 5", "5"),
        ("\\boxed{6} 5", "5"),
        ("-5", "5"),
        ("1,234", "234"),
        ("1000001", "1000000"),
        ("0.33", "1/3"),
        ("5/0", "5"),
        ("9" * 5000, "9"),
        ("1e999", "5"),
    ],
)
def test_arithmetic_pays_for_nothing_else(gsm8k, response, answer):
    assert gsm8k(response, answer) == 0.0


def test_arithmetic_needs_a_reference_with_a_number(gsm8k):
    with pytest.raises(ValueError, match="reference answer 'none' holds no number"):
        gsm8k("5", "none")
    with pytest.raises(KeyError, match="answer"):
        combination.load_reward(ARITHMETIC)("", "5", {})


@pytest.fixture(scope="module")
def vader():
    pytest.importorskip("vaderSentiment")
    return lambda text: combination.load_reward(f"{SENTIMENT}:vader")("", text, {})


def test_vader_orders_texts_within_bounds(vader):
    bad, neutral, good = map(
        vader, ("The lamp is ugly.", "The lamp is on the table.", "The lamp is beautiful.")
    )
    assert 0.0 < bad < neutral == 0.5 < good < 1.0
    assert vader("") == vader(" \n") == vader("!!!") == 0.0


def test_vader_pays_for_no_cheap_trick(vader):
    honest = vader("A beautiful lamp brings a warm glow and joy to the happy home.")
    assert (
        vader("love " * 20) == vader("love, LOVE love!!!") == pytest.approx(vader("love"))
        and vader("love") < honest
    )
    assert vader(":) " * 20) == vader(":)")
    plain = vader("The lamp is beautiful.")
    assert (
        vader("The LAMP is BEAUTIFUL!!!!")
        == vader("The lamp is beautiful. I love it. So great.")
        == plain
    )
    assert vader("The 3.5 inch lamp is beautiful.") > 0.5  # a decimal point ends no sentence


def test_textblob_is_another_opinion_without_downloads():
    pytest.importorskip("textblob")
    measure = combination.load_reward(f"{SENTIMENT}:textblob_polarity")
    bad, neutral, good = (
        measure("", f"The lamp is {word}.", {}) for word in ("ugly", "there", "beautiful")
    )
    assert 0.0 <= bad < neutral == 0.5 < good <= 1.0
    assert measure("", "", {}) == 0.0


def test_the_lexicons_that_are_not_here_are_named_with_their_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "textblob.en", None)
    for name in [name for name in sys.modules if name.startswith("sentiment_")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"textblob.en is missing; .* 'rlhf_jax\[quickstart\]'"):
        combination.load_reward(f"{SENTIMENT}:kind")


def test_only_the_parents_end_is_signalled(tmp_path):
    """Not a call's arrival, whose signal may come after the call was read and would end the
    child. What the reward starts does not inherit the end.
    """
    (tmp_path / "mine.py").write_text(
        "import contextlib, fcntl, os, sys\n"
        "def signalled(prompt, response, row):\n"
        "    found = []\n"
        "    for file in range(256):\n"
        "        with contextlib.suppress(OSError):\n"
        "            if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ASYNC:\n"
        "                own = fcntl.fcntl(file, fcntl.F_GETOWN) == os.getpid()\n"
        "                found.append((file, own, os.get_inheritable(file)))\n"
        "    return float(found == [(int(sys.argv[2]), True, False)])\n"
    )
    with Workers(f"{tmp_path}/mine.py:signalled", 1, 20.0) as pool:
        assert pool([Response("", [], {}, "")]).values.tolist() == [1.0]
