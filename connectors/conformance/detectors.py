"""All detectors of one harness, made and told in the right order."""

from __future__ import annotations

from interlace.connectors.conformance.call_order import CallOrder
from interlace.connectors.conformance.engine_shape import EngineShape
from interlace.connectors.conformance.hold_ups import HoldUps
from interlace.connectors.conformance.lawful_answers import LawfulAnswers
from interlace.connectors.conformance.load_examiner import LoadExaminer
from interlace.connectors.conformance.load_judge import LoadJudge
from interlace.connectors.conformance.load_ledger import LoadLedger
from interlace.connectors.conformance.mutation import MetadataCleared, Mutation
from interlace.connectors.conformance.oracle import Oracle
from interlace.connectors.conformance.page_watch import PageWatch, Painter
from interlace.connectors.conformance.pages import Pages
from interlace.connectors.conformance.parts import Parts
from interlace.connectors.conformance.repeated_queries import RepeatedQueries
from interlace.connectors.conformance.report_watch import ReportWatch
from interlace.connectors.conformance.stored_truth import Promises, StoredTruth
from interlace.connectors.conformance.watch import Detector, Watch
from interlace.connectors.conformance.watched_lanes import WatchedLanes


class Detectors:
    """Those that others need are attributes."""

    def __init__(
        self,
        watch: Watch,
        parts: Parts,
        pages: Pages,
        lanes: WatchedLanes,
        oracle: Oracle,
        truth: StoredTruth,
        *,
        answers: LawfulAnswers,
        shape: EngineShape,
        synthetic: bool,
    ) -> None:
        """`answers` has been listening since before there were pages. Lets `watch` tell them all.

        `synthetic`: the connector invents KV.
        """
        pool, size = parts.scheduler.kv_cache.pool, parts.scheduler.kv_cache.block_size
        num_ranks = len(pages.layers)
        self.order = CallOrder(watch, list(pages.layers[0]), num_ranks)
        self.mutation = Mutation(watch)
        self.ledger = LoadLedger(
            watch, pool, block_size=size, num_ranks=num_ranks, generation_of=pages.generation_of
        )
        self.reports = ReportWatch(watch, self.ledger, num_ranks, pages.generation_of)
        examiner = LoadExaminer(watch, pages, oracle, synthetic=synthetic)
        self.judge = LoadJudge(watch, pages, self.ledger, examiner, truth)
        self.promises = Promises(watch, truth, size, pages.generation_of)
        told: list[Detector] = [
            answers,
            self.order,
            self.mutation,
            MetadataCleared(watch, lambda rank: parts.worker_sides[rank]),
            PageWatch(watch, pages, self.ledger),
            Painter(watch, pages),
            HoldUps(watch, lanes, pages, self.ledger),
            RepeatedQueries(watch, parts.scheduler_side, shape.query_repeats),
            self.ledger,
            self.reports,
            self.judge,  # after `reports`, which notes what is told as lost
        ]
        watch.set_detectors(told if synthetic else [*told, self.promises])
