from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import Adapter, EngineRequest, SamplingParams


def test_the_root_of_blocks_differs_by_an_adapters_name_and_digest():
    base = EngineRequest(pack_ids([1]), SamplingParams(seed=0, max_tokens=1))
    adapters = [Adapter("a", "00"), Adapter("a", "01"), Adapter("b", "00")]
    requests = [base, *(base._replace(adapter=adapter) for adapter in adapters)]
    assert len({root_hash("model", lora_id=request.lora_id) for request in requests}) == 4
    assert base.lora_id == ""
