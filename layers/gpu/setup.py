"""Opens the GPU's runner: which graphs it captures, and how much memory is left for KV.

Device thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from interlace.engine.errors import ConfigError
from interlace.engine.ports import WorkerConnector
from interlace.layers.checkpoint.loading import Silent
from interlace.layers.decoder import Decoder
from interlace.layers.gpu.graphs import LOWER_WHAT, GraphSizes
from interlace.layers.gpu.runner import GpuRunner
from interlace.layers.graph_mode import GraphMode
from interlace.layers.hardware.fact import Unknown
from interlace.layers.hardware.host import c_compiler
from interlace.layers.kernels.toolchain import HAS_TRITON
from interlace.layers.kv_memory import PageShape
from interlace.layers.kv_pages import KVPages

_DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MIXED_SIZES = (
    *(16, 32),
    *range(64, 768, 64),
    *range(768, 1024, 128),
    *range(1024, 2048 + 1, 256),
)
_CHUNK_SIZES = (
    *range(640, 1024, 128),
    *range(1024, 2048, 256),
    *range(2048, 8192 + 1, 512),
)
"""So dense that padding costs the device no more than launching one by one would cost the host."""
_SLACK_BYTES = 256 << 20
"""For what cannot be measured beforehand: small graphs, copies of a connector, fragmentation."""
LEAST_CAPABILITY = (8, 0)
"""bfloat16 and asynchronous copies into shared memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuLimits:
    """What a runner on a GPU is made for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    mode: GraphMode

    @property
    def sizes(self) -> GraphSizes:
        """Steps that are captured; the last one of decodes holds all requests that may run."""
        most = self.max_num_batched_tokens
        most_decodes = min(self.max_num_seqs, most)
        decode = [size for size in _DECODE_SIZES if size < most_decodes]
        if most_decodes <= _DECODE_SIZES[-1]:
            decode.append(most_decodes)
        return GraphSizes(
            decode,
            [size for size in _MIXED_SIZES if size <= most],
            [size for size in _CHUNK_SIZES if size <= most],
        )

    @property
    def largest(self) -> GraphSizes:
        """One of each kind: others take hardly any memory more."""
        kinds = self.sizes
        return GraphSizes(kinds.decode[-1:], kinds.mixed[-1:], kinds.chunk[-1:])


def check_gpu(device: torch.device, head_dim: int) -> None:
    """Raises: `ConfigError` for a GPU that is too old, heads that no kernel takes, or if nothing is
    there to compile kernels with."""
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"{name} has compute capability {capability[0]}.{capability[1]}, and at least"
            f" {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} is needed: use device='cpu'."
        )
    if head_dim % 8 or head_dim > 256:
        raise ConfigError(
            f"heads of {head_dim} numbers are not supported on a GPU, only multiples of 8 up to"
            " 256: use device='cpu'."
        )
    if not HAS_TRITON:
        raise ConfigError(
            "a GPU needs Triton, which is not installed: install it (pip install triton; Linux"
            " only) or use device='cpu'."
        )
    compiler = c_compiler()
    if isinstance(compiler, Unknown):
        raise ConfigError(
            f"Triton needs a C compiler to launch kernels, but {compiler.reason}: install one (on"
            " Debian or Ubuntu: apt install gcc), or use device='cpu'."
        )


def open_runner(
    decoder: Decoder,
    pages: KVPages,
    eos_token_ids: Sequence[int],
    connectors: Sequence[WorkerConnector],
    limits: GpuLimits,
    hidden_state_layer_ids: Sequence[int] = (),
) -> GpuRunner:
    """A runner over `pages`, without graphs yet. Raises: `ConnectorError`; `ConfigError` if memory
    runs out."""
    try:
        return GpuRunner(
            decoder,
            pages,
            eos_token_ids,
            connectors,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            hidden_state_layer_ids=hidden_state_layer_ids,
            num_sms=torch.cuda.get_device_properties(decoder.device).multi_processor_count,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"no GPU memory is left for a step's buffers: {LOWER_WHAT}.") from error


def measure_num_blocks(
    decoder: Decoder, shape: PageShape, limits: GpuLimits, *, utilization: float
) -> int:
    """Blocks that fit beside the weights, the largest step and its graphs, the null block included.

    Runs and captures the largest steps once, over a pool of two blocks. Raises: `ConfigError` if
    not even one request of the model's length fits.
    """
    device = decoder.device
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    used_bytes = total_bytes - free_bytes - cached
    step_bytes = _measure_step(decoder, shape, limits)
    left = utilization * total_bytes - used_bytes - step_bytes - _SLACK_BYTES
    num_blocks = int(left // shape.block_bytes)
    least = 1 + -(-decoder.max_model_len // shape.block_size)
    if num_blocks < least:
        raise ConfigError(
            f"{max(left, 0) / 2**30:.2f} GiB are left for KV, and one request of"
            f" {decoder.max_model_len} tokens takes {least * shape.block_bytes / 2**30:.2f} GiB:"
            " raise gpu_memory_utilization, or lower max_model_len or max_num_batched_tokens."
        )
    return num_blocks


def _measure_step(decoder: Decoder, shape: PageShape, limits: GpuLimits) -> int:
    """Bytes that the largest step and the largest graphs take at their peak."""
    torch.cuda.synchronize()
    # A step would take what is cached, and graphs cannot: what they take would not be seen.
    torch.cuda.empty_cache()
    try:
        return _try_step(decoder, shape, limits)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ConfigError(
            f"a step of {limits.max_num_batched_tokens} tokens does not fit beside the weights:"
            " lower max_num_batched_tokens or max_num_seqs, or end what else uses the GPU."
        ) from error
    finally:
        torch.cuda.empty_cache()  # nobody has the runner any more


def _try_step(decoder: Decoder, shape: PageShape, limits: GpuLimits) -> int:
    """What `_measure_step` returns, if nothing is cached. Raises: `torch.OutOfMemoryError`."""
    device = decoder.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    reserved = torch.cuda.memory_reserved(device)
    runner = open_runner(decoder, KVPages.of(shape, num_blocks=2, device=device), (), [], limits)
    try:
        runner.run_padding()
        peak = torch.cuda.max_memory_allocated(device) - before
        runner.capture(limits.mode, limits.largest, Silent())
        graphs = torch.cuda.memory_reserved(device) - reserved - peak
    finally:
        runner.close()
    return peak + max(graphs, 0)
