"""Damaged texts that are no files: variables of launchers, addresses, greetings of processes.

Each is read as a possible value, or refused by an error of limited length.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline._src.cluster.detect import find
from feedline._src.cluster.launchers.launcher import ProcessInfo
from feedline._src.cluster.rendezvous import process_in
from feedline._src.files.folder import is_match
from feedline._src.files.store import Url

ENVIRONMENTS = [
    {
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "rack[2,4-5]-node[007-015],login", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2),2", "CUDA_VISIBLE_DEVICES": "0,1",
    },
    {
        "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_NAMESPACE": "prterun-node1-4711@1",
        "OMPI_MCA_orte_hnp_uri": "2074279936.0;tcp://10.0.0.1,10.1.0.1:36691", "CUDA_VISIBLE_DEVICES": "0,1",
    },
    {"FEEDLINE_COORDINATOR": "a:1234", "FEEDLINE_PROCESSES": "2", "JOB_COMPLETION_INDEX": "1"},
    {"JAX_COORDINATOR_ADDRESS": "[fd00::2]:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
]  # fmt: skip
ADDRESSES = ["s3://corpus/train/**/x-[0-9].npy", "gs://bucket/a*?.parquet", "https://host:80/path/x.tfrecord"]
PIECES = [
    "0", "-1", "999999999", "9" * 18, "9" * 5000, "1.5", "x", "", " ", "[", "]", "(x", ")", ",", ":", "/", "..",
    "\0", "é", "٣", "²", "*", "?", "[!", "[z-a]", "**/", "\\", "//", "@", "#", "%00", "(x999999999)", "[" * 3000,
]  # fmt: skip


@st.composite
def damaged(draw, text):
    """The text with one to three pieces replaced, inserted or cut."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        piece = draw(st.sampled_from(PIECES) | st.characters(max_codepoint=0x250))
        text = text[:start] + piece + text[start + draw(st.sampled_from([0, 0, 1, 3, 100])) :]
    return text


def read_or_refused(parse):
    refusal = None
    try:
        return parse()
    except (ValueError, TypeError) as error:
        refusal = str(error)
    assert len(refusal) <= 20_000
    return None


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=["Slurm", "Open MPI", "Kubernetes", "by hand"])
@given(st.data())
def test_variables_of_launchers(environment, data):
    environ = dict(environment)
    for name in data.draw(st.lists(st.sampled_from(sorted(environ)), min_size=1, max_size=2, unique=True)):
        environ[name] = data.draw(damaged(environ[name]) | st.just(""))  # empty: as if not set
    assert len(str(read_or_refused(lambda: find(environ)))) < 100_000


@given(st.sampled_from(ADDRESSES).flatmap(damaged))
def test_an_address_leads_out_of_no_bucket(address):
    url = read_or_refused(lambda: Url.parse(address))
    if url is not None:
        assert ".." not in url.key.split("/")
        is_match(["train", "x.npy"], url.key.split("/"))


@given(damaged("4 2"))
def test_a_greeting_to_the_port_of_the_coordinator_is_an_index_or_nothing(greeting):
    """Any program may send one before all processes have met."""
    found = process_in(greeting.encode(), ProcessInfo("Slurm", "x", "node1:61500", 4, 0))
    assert found is None or 0 < found < 4
