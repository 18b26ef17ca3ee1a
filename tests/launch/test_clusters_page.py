"""The blocks of docs/clusters.md run as they are printed, in a real Slurm; its nodes have no GPU to train on, and few cores."""

from pathlib import Path

import pytest
import yaml

from tests.fenced_blocks import ROOT, bash_blocks, run_blocks
from tests.launch.conftest import Lab
from tests.launch.test_kubernetes import check
from tests.test_guides import jsonl, put_gpt2_files, shrink_config

PAGE = ROOT / "docs" / "clusters.md"


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_the_blocks_run_from_the_raw_text_to_a_trained_model(lab: Lab, shared: Path) -> None:
    work = shared / "work"
    (shared / "raw").mkdir()
    work.mkdir()
    (shared / "raw" / "corpus.jsonl").write_bytes(jsonl())
    put_gpt2_files(work, shared / "cache")
    shrink_config(work, "gpt2_345m", train_iters=12, global_batch_size=8)
    page = work / "page.md"
    slurm, _ = bash_blocks(PAGE)
    assert slurm.count("--gpus-per-node 8") == 1 and slurm.count("--nodes 4") == 2
    page.write_text(f"```bash\n{slurm.replace('--gpus-per-node 8', '--nproc-per-node 1 --cpus-per-task 1')}```\n")
    environment = {name: value for name, value in lab.environment.items() if name != "PATH"}
    environment |= {"DATA_PATH": str(shared), "HOLDFAST_CACHE": str(shared / "cache")}
    run_blocks(page, work, **environment)
    assert (shared / "runs" / "345m" / "checkpoints" / "step-00000012" / "MANIFEST.json").is_file()


def test_the_kubernetes_block_prints_manifests_that_fit_their_schemas(tmp_path: Path) -> None:
    _, kubernetes = bash_blocks(PAGE)
    (tmp_path / "page.md").write_text(f"```bash\n{kubernetes.rstrip()} > manifests.yaml\n```\n")
    run_blocks(tmp_path / "page.md", tmp_path)
    manifests = list(yaml.safe_load_all((tmp_path / "manifests.yaml").read_text()))
    assert {manifest["kind"] for manifest in manifests} == {"ConfigMap", "Service", "Job"}
    for manifest in manifests:
        check(manifest)
