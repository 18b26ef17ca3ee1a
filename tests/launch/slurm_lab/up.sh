#!/bin/bash
# A real Slurm with virtual nodes on this machine, loopback only; idempotent: a second call revives what died.
#   LAB=/tmp/lab PORT=16800 NODES=4 CPUS=16 MEM=16000 GPUS=8 ./up.sh && . $LAB/env.sh && srun -N2 hostname
# One slurmd per virtual node; no cgroups, no systemd, a private munge key and socket, nothing written under /etc.
# As root every virtual node has its own UTS, mount and IPC namespace: hostname n<i>, names that resolve inside jobs only,
# its own /dev/shm and its own node-local tmpfs at $LAB/local. As a plain user there are no namespaces and no GPUs.
# PORT .. PORT+99 must be free: controller, one per node, and srun's own. Missing Debian packages are installed when root.
set -euo pipefail
NODES=${NODES:-4}; CPUS=${CPUS:-16}; MEM=${MEM:-16000}; GPUS=${GPUS:-8}; PORT=${PORT:-16800}
HERE=$(cd "$(dirname "$0")" && pwd); ME=$(id -un); HOST=$(hostname -s)

need() { # package... : installed now if they can be
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "needs the Debian packages $* (not root, or no apt here)"; exit 1; }
  apt-get -qq update >/dev/null 2>&1 || true
  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null 2>&1 ||
    { echo "apt-get could not install $*"; exit 1; }
}
PATH=$PATH:/usr/sbin:/sbin
for program in slurmctld slurmd munged srun; do
  command -v $program >/dev/null || { need munge slurmctld slurmd slurm-client libslurm-dev; break; }
done

mkdir -p "$LAB"/{log,state,munge,gpu,local}; chmod 755 "$LAB" "$LAB"/*; chmod 700 "$LAB/state"
for i in $(seq "$NODES"); do mkdir -p "$LAB/spool/n$i"; done
alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }

# ---- the Pyxis stand-in, where it can be compiled ----
: > "$LAB/plugstack.conf"
if [ -f /usr/include/slurm/spank.h ] && command -v gcc >/dev/null; then
  [ -f "$LAB/pyxis_stub.so" ] || gcc -shared -fPIC -o "$LAB/pyxis_stub.so" "$HERE/pyxis_stub.c"
  echo "required $LAB/pyxis_stub.so" > "$LAB/plugstack.conf"
fi

# ---- munge ----
[ -s "$LAB/munge/key" ] || (umask 077; head -c 1024 /dev/urandom > "$LAB/munge/key")
if ! alive "$LAB/munge/pid"; then
  rm -f "$LAB"/munge/socket* "$LAB/munge/pid"
  munged --force --key-file="$LAB/munge/key" --socket="$LAB/munge/socket" --pid-file="$LAB/munge/pid" \
         --log-file="$LAB/munge/log" --seed-file="$LAB/munge/seed" --num-threads=2
fi

# ---- configuration ----
NAMESPACES=0; if [ "$(id -u)" = 0 ] && unshare -m -u -i true 2>/dev/null; then NAMESPACES=1; fi
# gres needs character devices, or CUDA_VISIBLE_DEVICES is not set and the node is INVAL
if [ "$(id -u)" = 0 ]; then
  for g in $(seq 0 $((GPUS - 1))); do [ -c "$LAB/gpu/nvidia$g" ] || mknod "$LAB/gpu/nvidia$g" c 1 3 2>/dev/null || GPUS=0; done
else GPUS=0; fi
cp /etc/hosts "$LAB/hosts"; for i in $(seq "$NODES"); do echo "127.0.0.1 n$i" >> "$LAB/hosts"; done
echo "CgroupAutomount=no" > "$LAB/cgroup.conf"
: > "$LAB/gres.conf"; [ "$GPUS" = 0 ] || echo "NodeName=n[1-$NODES] Name=gpu File=$LAB/gpu/nvidia[0-$((GPUS - 1))]" > "$LAB/gres.conf"
[ -s "$LAB/slurm.conf" ] || { cat <<CONF
ClusterName=lab
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=$ME
SlurmdUser=$ME
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also the least time a requeued job waits (120 s by default)
AuthInfo=socket=$LAB/munge/socket,cred_expire=6
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool/%n
SlurmctldPidFile=$LAB/ctld.pid
SlurmdPidFile=$LAB/%n.pid
SlurmctldLogFile=$LAB/log/ctld.log
SlurmdLogFile=$LAB/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
# times are 10 to 300 times shorter than on a real cluster
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0,sched_min_interval=100000
SlurmctldTimeout=10
SlurmdTimeout=10
InactiveLimit=0
KillWait=20
UnkillableStepTimeout=30
BatchStartTimeout=20
CompleteWait=0
MinJobAge=3600
ReturnToService=2
JobRequeue=1
KillOnBadExit=1
WaitTime=0
PropagateResourceLimits=NONE
MaxArraySize=10001
FirstJobId=${FIRST_JOB:-1}
PlugStackConfig=$LAB/plugstack.conf
SrunPortRange=$((PORT + 20))-$((PORT + 99))
CONF
  GRES=""; [ "$GPUS" = 0 ] || { echo "GresTypes=gpu"; GRES=" Gres=gpu:$GPUS"; }
  for i in $(seq "$NODES"); do
    echo "NodeName=n$i NodeHostname=$HOST NodeAddr=127.0.0.1 Port=$((PORT + i)) CPUs=$CPUS RealMemory=$MEM$GRES State=UNKNOWN"
  done
  echo "PartitionName=main Nodes=n[1-$NODES] Default=YES MaxTime=INFINITE State=UP"
  echo "PartitionName=short Nodes=n[1-$NODES] MaxTime=1:00:00 State=UP"
} > "$LAB/slurm.conf"
echo "export SLURM_CONF=$LAB/slurm.conf SLURM_LAB=$LAB SLURM_LAB_NAMESPACES=$NAMESPACES" > "$LAB/env.sh"
export SLURM_CONF=$LAB/slurm.conf

# ---- daemons ----
start_slurmd() { # node number
  if [ "$NAMESPACES" = 1 ]; then
    unshare -m -u -i --propagation private sh -ec 'hostname "n$1"; mount --bind "$2/hosts" /etc/hosts
      mount -t tmpfs -o size=2g tmpfs "$2/local"; mount -t tmpfs -o size=2g tmpfs /dev/shm
      exec slurmd -N "n$1" -f "$2/slurm.conf"' sh "$1" "$LAB"
  else slurmd -N "n$1" -f "$LAB/slurm.conf"; fi
}
alive "$LAB/ctld.pid" || { rm -f "$LAB/ctld.pid"; slurmctld -f "$LAB/slurm.conf" -i; }
for i in $(seq "$NODES"); do alive "$LAB/n$i.pid" || { rm -f "$LAB/n$i.pid"; start_slurmd "$i"; }; done

for attempt in $(seq 300); do
  ready=$(sinfo -h -N -p main -o %T 2>/dev/null | grep -Ec '^(idle|mixed|allocated|completing)$' || true)
  [ "$ready" = "$NODES" ] && exit 0
  # a node that an earlier test set down is put back
  [ $((attempt % 10)) = 0 ] && { scontrol update nodename="n[1-$NODES]" state=resume >/dev/null 2>&1 || true; }
  sleep 0.2
done
echo "the virtual nodes did not come up"; sinfo -N; tail -n 8 "$LAB"/log/*.log; exit 1
