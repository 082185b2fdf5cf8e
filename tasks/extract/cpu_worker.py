"""vLLM's CPU worker with the capture; named to vLLM as ``tasks.extract.cpu_worker.CpuCaptureWorker``."""

from vllm.v1.worker.cpu_worker import CPUWorker

from tasks.extract.capture import CaptureMixin


class CpuCaptureWorker(CaptureMixin, CPUWorker):  # type: ignore[misc]
    pass
