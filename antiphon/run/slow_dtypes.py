"""Dtypes that this machine's CPU multiplies slower than float32."""

from collections.abc import Callable

from antiphon.cluster.devices import cpu_multiply_rate, is_cpu
from antiphon.engines.config import SERVER_KINDS, EngineKind
from antiphon.learning.config import LearnerConfig
from antiphon.run.config import RunConfig
from antiphon.run.config_checks.common import iterate_engines

NOTICEABLE = 1.2  # times slower; less is noise


def report_slow_dtypes(
    config: RunConfig, report: Callable[[str], None], rate: Callable[[str], float] = cpu_multiply_rate
) -> None:
    """Report each dtype of a learner or engine on this CPU with which the run is slower than with float32.

    A CPU without instructions for bfloat16 or float16 converts the numbers of a matrix product one by one. The rates are
    measured, since a system may hide instructions that the processor has. On a cluster nothing is reported: models may be on
    other machines.

    Args:
        config: The run's configuration.
        report: Called with each message.
        rate: Returns the operations a second of this CPU in products of a dtype.
    """
    if config.cluster.kind != "local":
        return
    models: list[tuple[str, LearnerConfig | EngineKind]] = [("learner", config.learner), *iterate_engines(config)]
    for key, model in models:
        if model.dtype not in ("bfloat16", "float16") or model.kind in SERVER_KINDS or not is_cpu(model.device):
            continue
        ratio = rate("float32") / rate(model.dtype)
        if ratio > NOTICEABLE:
            report(f"{key}.dtype: on this CPU {model.dtype} is {ratio:.1f} times slower than float32")
