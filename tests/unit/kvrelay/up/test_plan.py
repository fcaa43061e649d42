"""Which processes `kvrelay up` plans to run, and with which options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from common.config.service_configs import DecodeConfig, NodeConfig, PrefillConfig, RouterConfig, UpConfig
from common.config.sources import Resolved, resolve
from common.model.hub import DEMO_MODEL_PATH
from kvrelay.up.models import UpModel
from kvrelay.up.plan import ChildSpec, plan_children
from kvrelay.up.routers import RouterPlace

CLASSES = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig, "pooling": PrefillConfig}


def place(name: str, port: int) -> RouterPlace:
    return RouterPlace(name, port, port + 1, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}")


def plan(
    up: Resolved[UpConfig],
    *,
    own_redis: bool = True,
    gpus: tuple[str, ...] = (),
    models: tuple[UpModel, ...] = (),
    routers: tuple[RouterPlace, ...] = (place("router", 9000),),
) -> list[ChildSpec]:
    return plan_children(
        up.config,
        up.sources,
        models or [UpModel(up.config.model, "generate", Path(up.config.model))],
        redis_url="redis://:pw@127.0.0.1:7/0",
        routers=list(routers),
        own_redis=("redis-server",) if own_redis else None,
        host_name="box",
        admin_token="the-admin-token",
        gpus=list(gpus),
    )


def resolved(*, environ: dict[str, str] | None = None, file: str | None = None, **flags: str) -> Resolved[UpConfig]:
    return resolve(UpConfig, flags=flags, environ=environ or {}, file=file)


def on_gpus(gpus: tuple[str, ...], **flags: str) -> dict[str, tuple[str | None, float]]:
    """Of each node, the GPUs that it sees and the share of them that it may take."""
    up = resolve(UpConfig, flags=flags, environ={}, file=None)
    specs = [spec for spec in plan(up, gpus=gpus) if spec.role in ("prefill", "decode")]
    return {
        spec.name: (spec.environ.get("CUDA_VISIBLE_DEVICES"), as_the_child_sees_it(spec).gpu_memory_utilization)
        for spec in specs
    }


def as_the_child_sees_it(spec: ChildSpec, file: str | None = None):
    arguments = list(spec.argv[spec.argv.index("kvrelay") + 2 :])
    flags = {flag[2:].replace("-", "_"): value for flag, value in zip(arguments[::2], arguments[1::2], strict=True)}
    environ = {name: value for name, value in spec.environ.items() if name.startswith("KVRELAY_")}
    return resolve(CLASSES[spec.role], flags=flags, environ=environ, file=file).config


def test_default_is_one_of_each_with_redis_first() -> None:
    assert [spec.name for spec in plan(resolved())] == ["redis", "router", "prefill-0", "decode-0"]


def test_router_always_has_the_model_of_its_nodes(tmp_path) -> None:
    file = tmp_path / "k.toml"
    file.write_text('model = "/a"\n')
    for up, model in (
        (resolved(file=str(file), model="/b"), "/b"),
        (resolved(file=str(file), environ={"KVRELAY_MODEL": "/b"}), "/b"),
        (resolved(file=str(file)), "/a"),
    ):
        router, *nodes = (as_the_child_sees_it(spec, str(file)) for spec in plan(up)[1:])
        assert {node.model for node in nodes} == {model}
        assert router.model is None, "what the nodes report"


def test_nodes_get_the_planned_ranks_whatever_the_file_says(tmp_path) -> None:
    file = tmp_path / "k.toml"
    file.write_text("[prefill]\ntensor_parallel_size = 2\n[decode]\npipeline_parallel_size = 2\npp_layers = '3,4'\n")
    nodes = [as_the_child_sees_it(spec, str(file)) for spec in plan(resolved(file=str(file)))[2:]]
    assert [node.tensor_parallel_size for node in nodes] == [1, 1]
    assert (nodes[1].pipeline_parallel_size, nodes[1].pp_layers) == (1, "")


def test_existing_redis_is_not_started_and_node_ids_then_differ_between_machines() -> None:
    specs = plan(resolved(redis_url="redis://there"), own_redis=False)
    assert [spec.name for spec in specs] == ["router", "prefill-0", "decode-0"]
    assert specs[1].node_id == "prefill-0-box-9000"


def test_routers_differ_only_in_their_ports() -> None:
    up = resolved(api_key="hush", max_waiting="7", redis_url="redis://there")
    places = place("router-0", 9000), place("router-1", 9010)
    specs = plan(up, own_redis=False, routers=places)
    assert [spec.name for spec in specs] == ["router-0", "router-1", "prefill-0", "decode-0"]
    assert [(spec.role, spec.url) for spec in specs[:2]] == [("router", each.url) for each in places]
    first, second = map(as_the_child_sees_it, specs[:2])
    assert (first.port, first.admin_port, first.api_key, first.max_waiting) == (9000, 9001, "hush", 7)
    assert second == replace(first, port=9010, admin_port=9011)
    assert specs[2].node_id == "prefill-0-box-9000"


def test_options_reach_the_services_that_have_them() -> None:
    up = resolved(
        prefill="2",
        decode="2",
        max_waiting="7",
        dtype="bfloat16",
        served_model_name="m",
        model="/m",
        generation_config="none",
    )
    specs = {spec.name: as_the_child_sees_it(spec) for spec in plan(up) if spec.role != "redis"}
    assert list(specs) == ["router", "prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert (specs["router"].max_waiting, specs["router"].generation_config) == (7, "none")
    assert specs["router"].port == 9000
    assert {c.served_model_name for c in specs.values()} == {"m"}
    assert {c.redis_url for c in specs.values()} == {"redis://:pw@127.0.0.1:7/0"}
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        node = specs[name]
        assert (node.node_id, node.dtype, node.model, node.port) == (name, "bfloat16", "/m", 0)


def test_secrets_are_not_on_any_command_line() -> None:
    specs = plan(resolved(api_key="hush"))
    assert not [spec for spec in specs if "hush" in " ".join(spec.argv) or ":pw@" in " ".join(spec.argv)]
    assert as_the_child_sees_it(specs[1]).api_key == "hush"


def test_every_service_gets_the_admin_token_by_environment_and_a_port_on_loopback() -> None:
    environ = {"KVRELAY_ADMIN_PORT": "7", "KVRELAY_ADMIN_HOST": "0.0.0.0"}
    for spec in plan(resolved())[1:]:
        assert "the-admin-token" not in " ".join(spec.argv)
        config = as_the_child_sees_it(ChildSpec(spec.name, spec.role, spec.argv, {**environ, **spec.environ}))
        assert config.admin_token == "the-admin-token"
        assert (config.admin_host, config.admin_port) == ("127.0.0.1", 9001 if spec.role == "router" else 0)


def test_a_services_own_table_beats_the_top_level_but_not_a_flag_of_up(tmp_path) -> None:
    path = tmp_path / "k.toml"
    path.write_text("max_num_seqs = 1\nseed = 1\n[decode]\nmax_num_seqs = 2\nseed = 2\n")
    decode = plan(resolved(file=str(path), seed="3"))[-1]
    config = as_the_child_sees_it(decode, file=str(path))
    assert (config.max_num_seqs, config.seed) == (2, 3)


def test_port_in_the_environment_applies_to_up_and_not_to_the_nodes() -> None:
    environ = {"KVRELAY_PORT": "9000", "KVRELAY_HOST": "0.0.0.0"}
    for spec in plan(resolved(environ=environ))[2:]:
        config = as_the_child_sees_it(ChildSpec(spec.name, spec.role, spec.argv, {**environ, **spec.environ}))
        assert (config.port, config.host) == (0, "127.0.0.1")


def test_variables_of_nodes_on_other_hosts_do_not_move_those_of_up() -> None:
    """compose.multi-host.yaml sets them. The nodes of `kvrelay up` advertised an address at which they did not listen."""
    environ = {"KVRELAY_ADVERTISE_HOST": "192.0.2.7", "KVRELAY_NNODES": "2", "KVRELAY_NODE_RANK": "1"}
    for spec in plan(resolved(environ=environ))[2:]:
        config = as_the_child_sees_it(ChildSpec(spec.name, spec.role, spec.argv, {**environ, **spec.environ}))
        assert isinstance(config, NodeConfig)
        assert (config.advertise_host, config.nnodes, config.node_rank) == (None, 1, 0)


def test_no_node_gives_up_its_start_before_the_supervisor_does() -> None:
    def allowed(**flags: str) -> list[float]:
        return [as_the_child_sees_it(spec).start_timeout_s for spec in plan(resolved(**flags))[2:]]

    assert allowed(start_timeout_s="1800") == [1800.0, 1800.0]
    assert allowed() == [600.0, 600.0], "everything's own deadline, which is shorter, has the word"


def test_a_first_start_on_gpus_has_time_to_compile_kernels() -> None:
    def allowed(gpus: tuple[str, ...], **flags: str) -> list[float]:
        specs = plan(resolved(**flags), gpus=gpus)[2:]
        return [as_the_child_sees_it(spec).start_timeout_s for spec in specs]

    assert allowed(("0",)) == [1800.0, 1800.0]
    assert allowed(("0",), device="cpu") == [600.0, 600.0]
    assert allowed(("0",), start_timeout_s="60") == [600.0, 600.0], "what was asked for"


def test_favor_gives_the_other_role_a_higher_niceness() -> None:
    def niceness(favor: str) -> list[int]:
        return [as_the_child_sees_it(spec).nice for spec in plan(resolved(favor=favor))[2:]]

    assert niceness("balanced") == [0, 0]
    assert niceness("itl") == [5, 0]
    assert niceness("ttft") == [0, 5]


def test_decode_nodes_on_the_cpu_know_that_prefill_nodes_share_it() -> None:
    def knows(gpus: tuple[str, ...] = (), **flags: str) -> bool:
        [spec] = [spec for spec in plan(resolved(**flags), gpus=gpus) if spec.role == "decode"]
        return as_the_child_sees_it(spec).shared_cores

    assert knows()
    assert knows(favor="ttft")
    assert not knows(favor="itl")
    assert not knows(prefill="0")
    assert not knows(decode_pp="2")
    assert not knows(("0",))


def test_two_nodes_on_one_gpu_share_it_evenly_unless_fractions_are_stated() -> None:
    assert on_gpus(("0",)) == {"prefill-0": ("0", 0.45), "decode-0": ("0", 0.45)}
    stated = {"prefill_gpu_memory_utilization": "0.3", "decode_gpu_memory_utilization": "0.6"}
    assert on_gpus(("0",), **stated) == {"prefill-0": ("0", 0.3), "decode-0": ("0", 0.6)}


def test_no_gpu_is_shared_while_another_is_free() -> None:
    assert on_gpus(("0", "1")) == {"prefill-0": ("0", 0.9), "decode-0": ("1", 0.9)}
    assert on_gpus(("4", "5", "6"), prefill="1", prefill_tp="2", decode="2") == {
        "prefill-0": ("4,5", 0.45),
        "decode-0": ("6", 0.9),
        "decode-1": ("4", 0.45),
    }


def test_nodes_on_the_cpu_are_given_no_gpu_options() -> None:
    assert on_gpus(("0",), device="cpu") == on_gpus(()) == {"prefill-0": (None, 0.9), "decode-0": (None, 0.9)}


def test_each_model_gets_nodes_of_its_own_and_a_pooling_model_no_decode_node() -> None:
    models = (
        UpModel("/a", "generate", Path("/a")),
        UpModel("/e", "embed", Path("/e")),
        UpModel("/b", "generate", Path("/b")),
    )
    specs = [spec for spec in plan(resolved(decode="2"), models=models) if spec.role not in ("redis", "router")]
    assert [(spec.name, as_the_child_sees_it(spec).model) for spec in specs] == [
        *(("prefill-0", "/a"), ("decode-0", "/a"), ("decode-1", "/a")),
        ("pooling-0", "/e"),
        *(("prefill-1", "/b"), ("decode-2", "/b"), ("decode-3", "/b")),
    ]
    assert [spec.model_path for spec in specs] == ["/a", "/a", "/a", "", "/b", "/b", "/b"]


def test_a_given_tokenizer_reaches_routers_and_nodes_and_that_of_the_model_is_not_shared() -> None:
    specs = [spec for spec in plan(resolved(model="/a.gguf", tokenizer="/t")) if spec.role != "redis"]
    assert {as_the_child_sees_it(spec).tokenizer for spec in specs} == {"/t"}
    assert {spec.model_path for spec in specs} == {""}


def test_a_pooling_model_gets_the_options_unless_another_model_generates() -> None:
    given = {"kv_blocks": "100", "max_model_len": "64", "log_level": "debug", "prefill_tp": "2"}
    embed, demo = UpModel("/e", "embed", Path("/e")), UpModel("demo", "generate", DEMO_MODEL_PATH)
    alone = as_the_child_sees_it(plan(resolved(**given), models=(embed,))[-1])
    assert (alone.kv_blocks, alone.max_model_len, alone.log_level, alone.tensor_parallel_size) == (100, 64, "debug", 2)
    beside = as_the_child_sees_it(plan(resolved(**given), models=(demo, embed))[-1])
    assert (beside.kv_blocks, beside.max_model_len, beside.log_level, beside.tensor_parallel_size) == (
        None,
        None,
        "debug",
        1,
    )


def test_variables_reach_a_pooling_model_by_inheritance_and_not_as_flags() -> None:
    specs = plan(resolved(environ={"KVRELAY_KV_BLOCKS": "100"}), models=(UpModel("/e", "embed", Path("/e")),))
    assert "--kv-blocks" not in specs[-1].argv


def test_pooling_models_are_on_no_gpu() -> None:
    models = (UpModel("/e", "embed", Path("/e")), UpModel("demo", "generate", DEMO_MODEL_PATH))
    specs = plan(resolved(), models=models, gpus=("0", "1"))
    assert [spec.environ.get("CUDA_VISIBLE_DEVICES") for spec in specs[2:]] == [None, "0", "1"]


def test_a_node_knows_its_options_in_the_other_role() -> None:
    specs = {
        spec.name: spec for spec in plan(resolved(favor="ttft", decode_tp="2", prefill_max_num_batched_tokens="99"))
    }
    as_decode = json.loads(as_the_child_sees_it(specs["prefill-0"]).in_other_role or "{}")
    assert (as_decode["tensor_parallel_size"], as_decode["nice"], as_decode["max_num_batched_tokens"]) == (
        "2",
        "5",
        None,
    )
    as_prefill = json.loads(as_the_child_sees_it(specs["decode-0"]).in_other_role or "{}")
    assert as_prefill.items() >= {"tensor_parallel_size": "1", "nice": None, "max_num_batched_tokens": "99"}.items()
