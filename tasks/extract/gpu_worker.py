"""vLLM's GPU worker with the capture; named to vLLM as ``tasks.extract.gpu_worker.GpuCaptureWorker``."""

from vllm.v1.worker.gpu_worker import Worker

from tasks.extract.capture import CaptureMixin


class GpuCaptureWorker(CaptureMixin, Worker):  # type: ignore[misc]
    pass
