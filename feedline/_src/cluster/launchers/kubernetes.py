"""An Indexed Job of Kubernetes, or a JobSet: it gives each pod its index, and the manifest sets the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping

from feedline._src.cluster.launchers.launcher import Job, ProcessInfo, family

DOCS = """\
| Kubernetes | FEEDLINE_PROCESSES, in an Indexed Job or a JobSet | JOB_COMPLETION_INDEX, FEEDLINE_PROCESSES | \
FEEDLINE_COORDINATOR |"""
_INDEX = "JOB_COMPLETION_INDEX"
_MANIFEST = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: feedline
spec:
  network:
    enableDNSHostnames: true # gives pod 0 the name that FEEDLINE_COORDINATOR uses
  failurePolicy:
    maxRestarts: 3
  replicatedJobs:
    - name: train
      replicas: 1
      template:
        spec:
          completionMode: Indexed # gives each pod its JOB_COMPLETION_INDEX, which is its process index
          completions: {processes}
          parallelism: {processes} # all at once: they wait for each other
          backoffLimit: 0 # one pod cannot come back alone: the JobSet starts all of them again
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 120 # from SIGTERM to SIGKILL, to save a checkpoint
              containers:
                - name: feedline
                  image: example.com/feedline:latest # yours
                  command: {command}
                  env:
                    - name: FEEDLINE_PROCESSES
                      value: "{processes}" # completions
                    - name: FEEDLINE_COORDINATOR
                      # <jobset>-<job>-<replica>-<pod>.<jobset>, the port below
                      value: feedline-train-0-0.feedline:61500
{variables}                  ports:
                    - containerPort: 61500
{gpus}                  volumeMounts:
                    - name: shared-memory # NCCL passes data through /dev/shm
                      mountPath: /dev/shm
              volumes:
                - name: shared-memory
                  emptyDir:
                    medium: Memory
"""
_VARIABLE = """\
                    - name: {name}
                      value: {value}
"""
_GPUS = """\
                  resources:
                    limits:
                      nvidia.com/gpu: {gpus}
"""


def started(environ: Mapping[str, str]) -> bool:
    by_hand = environ.get("FEEDLINE_PROCESS")
    return bool(environ.get("FEEDLINE_PROCESSES") and environ.get(_INDEX) and not by_hand)


def find(environ: Mapping[str, str]) -> ProcessInfo | None:
    return family(environ, "Kubernetes", "FEEDLINE_COORDINATOR", "FEEDLINE_PROCESSES", _INDEX)


def printed(job: Job) -> str:
    """The manifest of a JobSet: a pod for each process, with its GPUs."""
    if job.names:
        raise ValueError(
            f"Kubernetes chooses the hosts of a JobSet, found the names {','.join(job.names)}; give their number: "
            f"--hosts {job.hosts}"
        )
    variables = (_VARIABLE.format(name=name, value=_quoted(value)) for name, value in job.variables.items())
    return _MANIFEST.format(
        processes=job.hosts * job.processes,
        command=f"[{', '.join(map(_quoted, job.command))}]",
        variables="".join(variables),
        gpus=_GPUS.format(gpus=job.gpus) if job.gpus else "",
    )


def _quoted(text: str) -> str:
    """The text as JSON, which YAML reads, too. Kubernetes would replace $(NAME) in it, but not $$(NAME)."""
    return json.dumps(text.replace("$(", "$$("), ensure_ascii=False)
