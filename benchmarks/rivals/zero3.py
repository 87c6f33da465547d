"""DeepSpeed ZeRO-3 with optimizer and parameters on NVMe, on the CPU, set up as kindly as it can be.

Scope: `PYTHON -m benchmarks.rivals.zero3 JOB.json` prints one object of figures. PYTHON belongs to an environment of
its own, with torch, transformers and deepspeed (0.19.8 was used), and a compiler with libaio's headers: `--build` in
place of the job builds what a run needs, once, in some minutes. Where libaio is not installed in the system, CFLAGS and
CPATH name its include folder, LDFLAGS, LIBRARY_PATH and LD_LIBRARY_PATH its library folder.
Not here: anything of this project; it does not depend on DeepSpeed.

Each setting that is not DeepSpeed's default, and why:
- `gradient_clipping` 0: the default of 1.0 would change the numbers.
- reentrant checkpointing: with parameters on NVMe the other kind gives wrong losses on the CPU, without an error.
- small sub-groups and buckets, `max_in_cpu` 0, no pipelining, nothing pinned or persistent: least memory.
- `MALLOC_MMAP_THRESHOLD_` in the environment (who starts this sets it): freed buffers go back to the system.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.rivals.job import Job, Meter, read_job, supervised_loss

SUB_GROUP = 20_000_000
BUCKET = 2_000_000
PARAM_BUFFERS = 5
BUILD = "--build"
BUILDERS = ("AsyncIOBuilder", "CPUAdamBuilder", "ShareMemCommBuilder")
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
}


def settings(job: Job, largest: int, batch: int) -> dict[str, Any]:
    """DeepSpeed's configuration. largest: elements of the largest parameter."""
    nvme = str(job.folder / "zero3")
    return {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": batch // job.micro_batch,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": job.optimizer},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                "device": "nvme",
                "nvme_path": nvme,
                "buffer_count": PARAM_BUFFERS,
                "buffer_size": largest,
                "max_in_cpu": 0,
                "pin_memory": False,
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": nvme,
                "buffer_count": 4,
                "pin_memory": False,
                "pipeline_read": False,
                "pipeline_write": False,
            },
            "overlap_comm": False,
            "sub_group_size": max(SUB_GROUP, largest),
            "reduce_bucket_size": max(BUCKET, largest),
            "stage3_prefetch_bucket_size": largest,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 2 * largest,
            "stage3_max_reuse_distance": 0,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True},
        "steps_per_print": 1 << 30,
    }


def build() -> None:
    """Compile what a run uses, or find it compiled: a compiler takes more memory than a run may.

    A build that was killed leaves a file `lock` in its folder of TORCH_EXTENSIONS_DIR (~/.cache/torch_extensions), for
    which the next one waits for ever: remove it.
    """
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    for builder in BUILDERS:
        accelerator.create_op_builder(builder).load()


def main(job: Job) -> None:
    deepspeed: Any = importlib.import_module("deepspeed")
    meter = Meter()
    deepspeed.init_distributed(dist_backend="gloo")
    batches = job.batches()
    largest = max(int(torch.Size(shape).numel()) for _, shape in job.offsets.values())
    config = settings(job, largest, len(batches[0]))
    (job.folder / "zero3").mkdir()
    values = {key: value for key, value in job.model.items() if key != "model_type"}
    architecture = AutoConfig.for_model(job.model["model_type"], **values)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(architecture)  # its modules cannot be imported inside zero.Init
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.float32):
        model: Any = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32)
    named = dict(model.named_parameters())
    for name, first in job.weights():
        with deepspeed.zero.GatheredParameters(named[name], modifier_rank=0), torch.no_grad():
            named[name].copy_(first)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()  # reentrant checkpoints start from an input that needs grad
    engine, *_ = deepspeed.initialize(model=model, config=config)
    meter.begin()
    for batch in batches:
        losses = []
        for part in batch.split(job.micro_batch):
            loss = supervised_loss(engine, part)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        meter.step(sum(losses) / len(losses))
    meter.report()


if __name__ == "__main__":
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if sys.argv[1] == BUILD:
        build()
    else:
        main(read_job(Path(sys.argv[1])))
