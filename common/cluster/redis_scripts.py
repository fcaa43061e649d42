"""Lua scripts for membership; Redis runs each of them as one step."""

HEAL = """
local function heal(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end
"""
"""Lua function that deletes a key of the wrong type, because every command on it would fail."""

# KEYS: fence, node, load, newest, nodes, epoch, adapters, role. ARGV: incarnation, its start time, lease in ms, record, node id,
# seconds until an id is forgotten, a new epoch, loaded adapters, their and the role's expiry in ms, the record in the newest
# protocol version, the role if it was changed, then alternately field and value of the load. Returns 1, or a newer holder's record.
RENEW = (
    HEAL
    + """
heal(KEYS[1], 'hash') heal(KEYS[2], 'string') heal(KEYS[3], 'hash') heal(KEYS[4], 'string') heal(KEYS[5], 'zset')
heal(KEYS[6], 'string') heal(KEYS[7], 'string') heal(KEYS[8], 'string')
local holder = redis.call('HMGET', KEYS[1], 'incarnation', 'started_at')
if holder[1] and holder[1] ~= ARGV[1] then
  local theirs, mine = tonumber(holder[2]) or 0, tonumber(ARGV[2])
  -- A holder writes fence and record at once: a fence beside another record belongs to no node.
  local record = redis.call('GET', KEYS[2])
  local is_node = record and string.find(record, holder[1], 1, true)
  -- Incarnations break the tie, so that exactly one of the two ends.
  if is_node and (theirs > mine or (theirs == mine and holder[1] > ARGV[1])) then
    return record
  end
end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[1], 'started_at', ARGV[2])
redis.call('SET', KEYS[2], ARGV[4])
redis.call('HSET', KEYS[3], unpack(ARGV, 12))
if ARGV[10] == '' then redis.call('DEL', KEYS[4]) else redis.call('SET', KEYS[4], ARGV[10]) end
if ARGV[8] == '' then redis.call('DEL', KEYS[7])
elseif ARGV[8] == 'keep' then redis.call('PEXPIRE', KEYS[7], ARGV[9])
else redis.call('SET', KEYS[7], ARGV[8], 'PX', ARGV[9]) end
if ARGV[11] == '' then redis.call('DEL', KEYS[8]) else redis.call('SET', KEYS[8], ARGV[11], 'PX', ARGV[9]) end
for i = 1, 4 do redis.call('PEXPIRE', KEYS[i], ARGV[3]) end
-- Redis's clock, because a node whose own clock is an hour ahead would make Redis forget all others.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
redis.call('ZADD', KEYS[5], string.format('%.6f', now), ARGV[5])
for _, range in ipairs({{'-inf', now - ARGV[6]}, {now + ARGV[6], '+inf'}}) do
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], range[1], range[2])) do
    redis.call('ZREM', KEYS[5], id)
    -- These keys have expired already, unless somebody wrote them without an expiry.
    for i = 1, 4 do redis.call('DEL', string.sub(KEYS[i], 1, -1 - #ARGV[5]) .. id) end
  end
end
redis.call('SET', KEYS[6], ARGV[7], 'NX')
return 1
"""
)

# KEYS: fence, node, load, newest, nodes, blocks, events. ARGV: incarnation, node id, lease in ms. For a lease, an empty record tells a
# node that has left from one whose keys were evicted.
DEREGISTER = """
redis.call('DEL', KEYS[6], KEYS[7])
if redis.call('HGET', KEYS[1], 'incarnation') == ARGV[1] then
  redis.call('DEL', KEYS[1], KEYS[3], KEYS[4])
  redis.call('SET', KEYS[2], '', 'PX', ARGV[3])
  redis.call('ZREM', KEYS[5], ARGV[2])
end
return 1
"""

# KEYS: epoch, nodes. ARGV: prefixes of the keys of records, before the node id. Returns the epoch, each id with the time of its
# renewal, and for each prefix the ids' records. All are read at one moment: data that a restarted Redis has lost is missing in all of them.
READ = """
local renewals = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
local function read(prefix)
  local keys = {}
  for i = 1, #renewals, 2 do keys[#keys + 1] = prefix .. renewals[i] end
  return #keys > 0 and redis.call('MGET', unpack(keys)) or {}
end
return {redis.call('GET', KEYS[1]), renewals, read(ARGV[1]), read(ARGV[2])}
"""
