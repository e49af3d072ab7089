"""Live figures of the whole process: as one dict, logged with training, and for ``forebay top``.

Nothing here changes what is computed, and nothing is opened, written or listened to unless a function is called.
"""

from forebay.monitor.figures import scalars, stats
from forebay.monitor.logger import StatsLogger, log_stats
from forebay.monitor.publisher import Publisher, publish
from forebay.monitor.schema import SCHEMA, Stats

__all__ = ["SCHEMA", "Publisher", "Stats", "StatsLogger", "log_stats", "publish", "scalars", "stats"]
