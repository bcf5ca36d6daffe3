"""Roll-outs one step ahead: samples of the next step are generated during this step's training."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

from rlhf_jax.generation.ahead import SamplesAhead
from rlhf_jax.generation.requests import RoundReport
from rlhf_jax.generation.speculative.round import ModelPair
from rlhf_jax.monitoring.parts import PhaseParts
from rlhf_jax.monitoring.trace import Span, since
from rlhf_jax.rewards.samples import Rewards
from rlhf_jax.runtime.background import BackgroundTask
from rlhf_jax.sources.drawn import Drawn
from rlhf_jax.sources.roll_out import RollOut
from rlhf_jax.sources.rollouts import Rollouts
from rlhf_jax.state import HostState, Observer, RunState, remembered

RoundObserver = Callable[[RoundReport], None]


@dataclasses.dataclass(frozen=True)
class RolloutsAhead(Rollouts):
    """Return samples from before the last update, and prefetch the next ones in the background.

    Both use the weights that a step begins with. The first step draws its own samples first, and
    the last one prefetches none. Only the caller's thread observes.
    """

    steps: int = 1  # of the run

    @contextlib.contextmanager
    def draw(self, state: RunState, observe: Observer) -> Iterator[Drawn]:
        """Compute the rewards of prefetched samples, and prefetch others meanwhile."""
        began = time.perf_counter()
        models = self.models(state)
        spans: list[Span] = []

        def draw(host: HostState, report: RoundObserver) -> HostState:
            host = self.prefetch(models, host, report)
            ahead = samples_ahead(host)
            spans.extend(since(ahead.spans, began - ahead.began))
            return host

        host = state.host
        if remembered(host).ahead is None:
            observe("generation", None)
            host = draw(host, functools.partial(observe, "generation"))
        with contextlib.ExitStack() as stack:
            task = None
            if state.step + 1 < self.steps:
                work = functools.partial(draw, host)
                task = stack.enter_context(BackgroundTask(work, "generation"))
            drawn = self._rewarded(host, observe, began)
            if task is None:
                yield drawn
            else:
                drawn.check = task.check
                yield drawn
                waits = time.perf_counter()
                observe("waiting", None)
                # The samples were drawn beside the rewards, whose memory is newer.
                memory = drawn.host.memory.get("reward", {})
                host = task.result(functools.partial(observe, "waiting"))
                drawn.host = host.remember("reward", memory)
                drawn.metrics["lag/waited_seconds"] = time.perf_counter() - waits
        drawn.spans = spans + drawn.spans

    def prefetch(self, models: ModelPair, host: HostState, report: RoundObserver) -> HostState:
        """Draw the samples of the next prompts, to be rewarded later; return the host with them.

        models: after the updates of `host`. `report` receives each round.
        """

        def observe(phase: str, event: RoundReport | PhaseParts | None) -> None:
            if isinstance(event, RoundReport):
                report(event)

        work = RollOut(host, self.stream.prompts, self.settings, self._later, observe)
        rows, position = self.stream.batches.take(host.position)
        before = remembered(host)
        first_id = before.next_id
        samples = work.generate(models, rows, first_id, f"samples from {first_id}")
        stats, spans, metrics = work.close(samples, models[1])
        began = work.record.began
        ahead = SamplesAhead(samples, rows, host.step, metrics, began=began, spans=spans)
        after = before.after(samples, stats, first_id + len(samples))
        return host.after_draw(position, dataclasses.replace(after, ahead=ahead))

    def _rewarded(self, host: HostState, observe: Observer, began: float) -> Drawn:
        """Compute the rewards of prefetched samples, and drop these from the host state."""
        ahead = samples_ahead(host)
        work = RollOut(host, self.stream.prompts, self.settings, self._later, observe)
        rewarded = work.reward(ahead.samples, ahead.rows)
        metrics = ahead.metrics | self.measured(rewarded, attempts=1)
        metrics["inference/seconds"] = work.metrics["inference/seconds"]
        rest = dataclasses.replace(remembered(host), ahead=None)
        after = dataclasses.replace(host, generation=rest).remember("reward", work.memory)
        drawn = self.drawn(rewarded, after, metrics, began, [])
        return dataclasses.replace(drawn, behind=host.step - ahead.drawn_at)

    @property
    def _later(self) -> Rewards:
        """Return the rewards without computing any as samples finish."""
        return dataclasses.replace(self.rewards, eager={})


def samples_ahead(host: HostState) -> SamplesAhead:
    """Return the prefetched samples, which must exist."""
    ahead = remembered(host).ahead
    assert ahead is not None, "Samples were drawn ahead."
    return ahead
