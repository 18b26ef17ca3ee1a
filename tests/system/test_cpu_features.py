"""AMX that traps is found by a child process once per boot, avoided, and explained when it kills a rank."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.launch.doctor import check_cpu
from holdfast.system.cpu_features import Probe, avoid_amx_traps, examine_amx, explain_sigill
from tests.corpus import VOCABULARY, write_dataset

AMX = "processor\t: 0\nflags\t\t: fpu avx512f amx_bf16 avx512_fp16 amx_tile\n"
WORKS = "pass"
TRAPS = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.setenv(name, "")


@pytest.fixture
def cpuinfo(tmp_path: Path) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(AMX)
    return path


def counting(tmp_path: Path, cpuinfo: Path, code: str) -> Probe:
    """A stand-in for the product that writes a line for each start."""
    started = f"open({str(tmp_path / 'starts')!r}, 'a').write('x\\n'); {code}"
    return Probe(cpuinfo, (sys.executable, "-c", started), tmp_path)


def starts(tmp_path: Path) -> int:
    path = tmp_path / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_cpu_whose_amx_traps_is_limited_and_tried_once(
    tmp_path: Path, cpuinfo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = counting(tmp_path, cpuinfo, TRAPS)
    for _ in range(2):
        os.environ["ONEDNN_MAX_CPU_ISA"] = ""
        assert avoid_amx_traps(probe) == "traps"
        assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
        (line,) = capsys.readouterr().err.splitlines()
        assert "SIGILL" in line and "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in line
    assert starts(tmp_path) == 1


def test_amx_that_works_is_tried_once_and_left_alone(tmp_path: Path, cpuinfo: Path) -> None:
    probe = counting(tmp_path, cpuinfo, WORKS)
    assert [avoid_amx_traps(probe) for _ in range(2)] == ["works", "works"]
    assert (starts(tmp_path), os.environ["ONEDNN_MAX_CPU_ISA"]) == (1, "")


@pytest.mark.parametrize("flags", ["flags\t\t: fpu avx2 avx512f\n", ""])
def test_a_cpu_without_amx_starts_no_process(tmp_path: Path, cpuinfo: Path, flags: str) -> None:
    cpuinfo.write_text(flags)
    assert avoid_amx_traps(counting(tmp_path, cpuinfo, TRAPS)) == "absent"
    assert (starts(tmp_path), os.environ["ONEDNN_MAX_CPU_ISA"]) == (0, "")


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_a_limit_that_the_user_chose_is_kept(
    tmp_path: Path, cpuinfo: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "AVX2")
    assert avoid_amx_traps(counting(tmp_path, cpuinfo, TRAPS)) == "limited"
    assert (starts(tmp_path), os.environ[name]) == (0, "AVX2")


@pytest.mark.parametrize("code", ["import time; time.sleep(600)", "raise MemoryError"])
def test_a_probe_that_hangs_or_fails_is_not_recorded(tmp_path: Path, cpuinfo: Path, code: str) -> None:
    probe = counting(tmp_path, cpuinfo, code)
    assert avoid_amx_traps(replace(probe, seconds=3.0)) == "unknown"
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
    os.environ["ONEDNN_MAX_CPU_ISA"] = ""
    assert examine_amx(counting(tmp_path, cpuinfo, WORKS)) == "works"


def test_a_folder_that_others_can_write_is_not_trusted(tmp_path: Path, cpuinfo: Path) -> None:
    assert examine_amx(counting(tmp_path, cpuinfo, WORKS)) == "works"
    (folder,) = tmp_path.glob("holdfast-cpu-*")
    assert folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o777)
    assert examine_amx(counting(tmp_path, cpuinfo, TRAPS)) == "traps"
    folder.chmod(0o700)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert examine_amx(counting(tmp_path, cpuinfo, TRAPS)) == "traps"


def test_the_real_products_work_here_or_trap(tmp_path: Path, cpuinfo: Path) -> None:
    assert examine_amx(Probe(cpuinfo, memory=tmp_path)) in ("works", "traps")


def test_doctor_reports_it(tmp_path: Path, cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = check_cpu(counting(tmp_path, cpuinfo, TRAPS))
    assert (check.verdict, "SIGILL" in check.found) == ("warn", True)
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in check.advice
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    (check,) = check_cpu(counting(tmp_path, cpuinfo, TRAPS))
    assert (check.verdict, "limited to AVX2" in check.found) == ("pass", True)
    cpuinfo.write_text("")
    (check,) = check_cpu(counting(tmp_path, cpuinfo, TRAPS))
    assert (check.verdict, check.found) == ("pass", "no AMX")


def test_the_explanation_fits_the_cpu(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in explain_sigill(cpuinfo)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    assert "set a lower one" in explain_sigill(cpuinfo)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    cpuinfo.write_text("")
    assert "built for another CPU" in explain_sigill(cpuinfo)


DRIVER = """
import sys
from pathlib import Path
from holdfast.cli import main
from holdfast.system import cpu_features
from holdfast.train import supervisor
folder = Path(sys.argv.pop(1))
probe = cpu_features.Probe(folder / "cpuinfo", (sys.executable, "-c", sys.argv.pop(1)), folder)
supervisor.reports_amx = lambda: True
supervisor.avoid_amx_traps = lambda: cpu_features.avoid_amx_traps(probe)
main()
"""


@pytest.mark.distributed
def test_ranks_inherit_the_limit_and_one_that_dies_by_sigill_all_the_same_is_not_restarted(
    tmp_path: Path, cpuinfo: Path
) -> None:
    """The real supervisor on a CPU that reports AMX; rank 1 notes its environment and kills itself."""
    trap = tmp_path / "site" / "sitecustomize.py"
    trap.parent.mkdir()
    trap.write_text(
        "import os, signal\n"
        "if os.environ.get('RANK') == '1':\n"
        f"    open({str(tmp_path / 'starts')!r}, 'a').write(os.environ['ONEDNN_MAX_CPU_ISA'] + '\\n')\n"
        "    os.kill(os.getpid(), signal.SIGILL)\n"
    )
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 2 "
        f"--eval-interval 0 --no-tensorboard --nproc-per-node 2 --max-restarts 3 --no-fork-server --bf16 "
        f"--vocab-size {VOCABULARY}"
    ).split()
    prefix, run = write_dataset(tmp_path / "corpus"), tmp_path / "run"
    command = [sys.executable, "-c", DRIVER, str(tmp_path), TRAPS, "train", *flags]
    environment = {**os.environ, "PYTHONPATH": str(trap.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--data-path", str(prefix), "--save", str(run)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert (tmp_path / "starts").read_text() == "AVX512_CORE_FP16\n"  # once, with the limit
    limited, error = (line for line in done.stderr.splitlines() if "SIGILL" in line)
    assert limited.endswith("oneDNN runs without it (ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16)")
    assert error.startswith("holdfast: error: rank 1: killed by SIGILL") and "set a lower one" in error
    assert "Traceback" not in done.stderr
    assert f'"exit_code":{-signal.SIGILL}' in (run / "events.jsonl").read_text().replace(" ", "")
