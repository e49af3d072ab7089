"""Live figures of the whole process: as one dict, logged with training, and for ``forebay top``.

Nothing here changes what is computed, and nothing is opened, written or listened to unless a function is called.
"""

from forebay.monitor.logger import StatsLogger, log_stats
from forebay.monitor.publish import Publisher, publish
from forebay.monitor.schema import SCHEMA, Stats
from forebay.monitor.stats import scalars, stats

__all__ = ["SCHEMA", "Publisher", "Stats", "StatsLogger", "log_stats", "publish", "scalars", "stats"]
