"""The log on Kafka, over confluent-kafka (librdkafka).

    KafkaLog --+--> Admin, fetch_ends     topics, settings, bounds           admin.py, ends.py
               +--> KafkaWriter           append, back-pressure, futures     writer.py, doubt.py
               +--> KafkaConsumer         groups and hand-named partitions   consumer.py
    settings.py: what the clients are told; errors.py: what they say

Which broker can do what is written in docs/brokers.md.
"""

from .consumer import KafkaConsumer
from .log import KafkaLog
from .writer import KafkaWriter

__all__ = ["KafkaConsumer", "KafkaLog", "KafkaWriter"]
