-- Restores versions of a document that are newer than the current one.
--
-- KEYS: the versions of all documents; the history of this one.
-- ARGV: name; how many entries to keep; then pairs of version and entry, in ascending order.
local version = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0')
for at = 3, #ARGV, 2 do
  if tonumber(ARGV[at]) > version then
    version = tonumber(ARGV[at])
    redis.call('HSET', KEYS[1], ARGV[1], version)
    redis.call('RPUSH', KEYS[2], ARGV[at + 1])
  end
end
redis.call('LTRIM', KEYS[2], -tonumber(ARGV[2]), -1)
return version
