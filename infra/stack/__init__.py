"""The local stack: an object store and a broker as child processes on loopback, for the demo, for tests and for a try.

    LocalStack(directory).start() --> Endpoints                      ends with this process
    up(directory) --> Endpoints ... status ... down(directory)       stays in between

Needs the extra `local` (Tansu and SeaweedFS); with `broker="kafka"` an unpacked Apache Kafka in KAFKA_HOME and a Java.
"""

from .background import DEFAULT_DIRECTORY, ComponentStatus, down, status, up
from .component import Progress
from .endpoints import AlreadyUp, Broker, Endpoints, GroupProtocol, StackError
from .layout import find_obstacle
from .local import LocalStack

__all__ = [
    "DEFAULT_DIRECTORY",
    "AlreadyUp",
    "Broker",
    "ComponentStatus",
    "Endpoints",
    "GroupProtocol",
    "LocalStack",
    "Progress",
    "StackError",
    "down",
    "find_obstacle",
    "status",
    "up",
]
