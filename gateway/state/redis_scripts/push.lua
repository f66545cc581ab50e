-- Adds one batch of a writer's sums to a page. A bucket is a field "[...]" of the page's hash; its value is the sums,
-- separated by spaces. Fields that begin with a dot describe the page.
--
-- KEYS: the page; the index of the model's pages, page name = "generation version end".
-- ARGV: name of the page; its end, in seconds since 1970; now; writer; the generation known to the writer, or "";
--       number of the batch; the generation of a new page; then pairs of bucket and sums to add.
-- Returns the generation of the page ("" if there is none), and the number of the writer's last batch in it.
local page, index = KEYS[1], KEYS[2]
local name, page_end, now, writer, known, batch = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5], tonumber(ARGV[6])

local generation = redis.call('HGET', page, '.generation')
if generation and generation == known then
  local last = tonumber(redis.call('HGET', page, '.batch ' .. writer) or '0')
  if last >= batch then
    return {generation, last} -- a repeated push, whose reply was lost
  end
  if last < batch - 1 then -- the store was reset to an older state, so no writer knows its share of this page
    redis.call('DEL', page)
    redis.call('HDEL', index, name)
    return {'', 0}
  end
elseif generation and known == '' then
  local last = tonumber(redis.call('HGET', page, '.batch ' .. writer) or '0')
  if last >= batch then
    return {generation, last}
  end
elseif known ~= '' then
  return {generation or '', 0}
else
  generation = ARGV[7]
  redis.call('HSET', page, '.generation', generation)
  local pages = redis.call('HGETALL', index) -- remove expired pages from the index
  for at = 1, #pages, 2 do
    local ends = tonumber(string.match(pages[at + 1], '%S+$'))
    if not ends or ends <= now then
      redis.call('HDEL', index, pages[at])
    end
  end
end

for at = 8, #ARGV, 2 do
  local sums = ARGV[at + 1]
  local before = redis.call('HGET', page, ARGV[at])
  if before then
    local added, next_before = {}, string.gmatch(before, '%S+')
    for number in string.gmatch(sums, '%S+') do
      added[#added + 1] = string.format('%.17g', tonumber(number) + tonumber(next_before() or '0'))
    end
    sums = table.concat(added, ' ')
  end
  redis.call('HSET', page, ARGV[at], sums)
end
redis.call('HSET', page, '.batch ' .. writer, batch)
local version = redis.call('HINCRBY', page, '.version', 1)
redis.call('EXPIREAT', page, math.ceil(tonumber(page_end)))
redis.call('HSET', index, name, generation .. ' ' .. version .. ' ' .. page_end)
return {generation, batch}
