#!/bin/sh
# An independent client: Neovim's own MessagePack-RPC channel, headless, against skvd with a small random model.
set -u
build=${top_builddir:-build}
command -v nvim >/dev/null || { echo 'nvim is not installed'; exit 77; }
dir=$(mktemp -d) || exit 99
daemon=
tidy() {
    [ -z "$daemon" ] || { kill "$daemon" 2>/dev/null; wait "$daemon"; }
    rm -rf "$dir"
}
trap tidy EXIT
trap 'exit 1' INT TERM HUP

"$build/tests/random-model" --layers 2 "$dir/model.gguf" || exit 99
"$build/skvd" --model "$dir/model.gguf" --socket "$dir/sock" --threads 1 --kv-memory 64M >"$dir/log" 2>&1 &
daemon=$!
i=0
until grep -qw ready "$dir/log"; do
    i=$((i + 1))
    if [ $i -gt 600 ] || ! kill -0 "$daemon" 2>/dev/null; then
        cat "$dir/log"
        exit 99
    fi
    sleep 0.1
done

cat >"$dir/test.lua" <<'END'
local path, out = vim.env.SKVD_SOCKET, {}
local passed, failed = 0, 0
local function check(name, ok, what)
  if ok then passed = passed + 1 else failed = failed + 1; table.insert(out, 'FAIL: ' .. name .. ': ' .. vim.inspect(what)) end
end
local ch = vim.fn.sockconnect('pipe', path, { rpc = true })
check('connects', ch > 0, ch)
local hello = vim.fn.rpcrequest(ch, 'hello', { client = 'nvim' })
check('hello', hello.server == 'skvd' and hello.protocol == 1 and hello.model.layers == 2, hello)
local ask = { prompt = 'the quick brown fox', stream = false, max_tokens = 12, temperature = 0, ignore_eos = true }
local a = vim.fn.rpcrequest(ch, 'generate', ask)
check('generate', #a.tokens == 12 and a.finish == 'length' and a.completion_tokens == 12 and a.prompt_tokens > 0, a)
local b = vim.fn.rpcrequest(ch, 'generate', ask)
check('the same again', vim.deep_equal(a.tokens, b.tokens), { a, b })
ask = { messages = { { role = 'user', content = 'hi' } }, stream = false, max_tokens = 4, ignore_eos = true }
a = vim.fn.rpcrequest(ch, 'generate', ask)
check('messages', #a.tokens == 4, a)
local ids = vim.fn.rpcrequest(ch, 'tokenize', { text = 'sphinx of black quartz' }).tokens
local text = vim.fn.rpcrequest(ch, 'detokenize', { tokens = ids }).text
check('tokens and back', text == 'sphinx of black quartz', text)
local ok, err = pcall(vim.fn.rpcrequest, ch, 'generate', { promt = 'x' })
check('a typo is an error', not ok, err)
ok, err = pcall(vim.fn.rpcrequest, ch, 'no_such_method', {})
check('an unknown method is an error', not ok, err)
-- dictionaries without entries are sent as [] or {}: both mean no arguments
local s = vim.fn.rpcrequest(ch, 'status')
check('status', type(s) == 'table' and next(s) ~= nil, s)
vim.fn.chanclose(ch)
table.insert(out, passed .. ' passed, ' .. failed .. ' failed')
vim.fn.writefile(out, vim.env.RESULT)
vim.cmd(failed == 0 and 'qall!' or 'cquit')
END
SKVD_SOCKET=$dir/sock RESULT=$dir/result XDG_CONFIG_HOME=$dir XDG_DATA_HOME=$dir XDG_STATE_HOME=$dir \
    timeout 120 nvim --headless -u NONE -i NONE -n -S "$dir/test.lua" >"$dir/nvim.out" 2>&1 </dev/null
status=$?
if [ -f "$dir/result" ]; then
    cat "$dir/result"
else
    cat "$dir/nvim.out" "$dir/log"
    echo '0 passed, 1 failed'
fi
exit $status
