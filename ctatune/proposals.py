"""What Optuna would try next, fed with everything that is known (ask and tell)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ctatune.config import AnyConfig, Config

ASKS = 200  # in a row that lead to nothing new before Optuna is given up
_NAMES = ("tile", "up_group", "down_group", "way", "pace")


def axes(config: Config) -> tuple[str, ...]:
    """The coordinates of a config in the space that Optuna sees (all of them categories)."""
    split = ":".join(map(str, config.stage_split))
    up, down = (f"{tile.m}x{tile.n}/{tile.split_k}" for tile in config.tiles)
    kind = f"{config.multicast:d}{config.direct:d}{config.swap_ab:d}"
    return (
        f"{up}-{down}-{config.stages}-{config.d_slabs}-{kind}",
        str(config.up.group_m),
        str(config.down.group_m),
        f"{config.mix:g}@{split}{config.down_axis}",
        f"{config.pace_us:g}",
    )


class Proposals:
    """Iterates over configs of `ranked` that were not told yet, as Optuna's sampler wants them.

    The objective is the logarithm of the latency; a failed trial is told as failed.
    """

    def __init__(self, ranked: Sequence[Config], known: Mapping[AnyConfig, float | None]) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._configs = {axes(config): config for config in ranked}
        self._told: set[Config] = set()
        self._space: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution(sorted(set(values)))
            for name, values in zip(_NAMES, zip(*self._configs, strict=True), strict=False)
        }
        sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=0)
        self._study = optuna.create_study(sampler=sampler)
        for config in ranked:
            if config in known:
                self.tell(config, known[config])

    def tell(self, config: Config, latency_us: float | None) -> None:
        """Add a finished trial; None: it failed."""
        self._told.add(config)
        if axes(config) not in self._configs:
            return
        state = self._optuna.trial.TrialState
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=dict(zip(_NAMES, axes(config), strict=True)),
                distributions=self._space,
                value=None if latency_us is None else math.log(latency_us),
                state=state.FAIL if latency_us is None else state.COMPLETE,
            )
        )

    def __iter__(self) -> Iterator[Config]:
        misses = 0
        while misses < ASKS and self._space:
            trial = self._study.ask(self._space)
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            config = self._configs.get(tuple(trial.params[name] for name in _NAMES))
            if config is None or config in self._told:
                misses += 1
                continue
            misses = 0
            yield config
