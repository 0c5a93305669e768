#!/bin/sh
# Small whole models to begin with: gguf_seeds.sh RANDOM_MODEL FOLDER
set -eu
shape='--layers 1 --width 32 --heads 2 --kv-heads 1 --head-dim 16 --ffn 32 --vocab 384'
# shellcheck disable=SC2086
{
    "$1" $shape --type Q4_0 "$2/gpt2.gguf"
    "$1" $shape --type Q8_0 --tokenizer llama "$2/llama.gguf"
    "$1" $shape --type Q5_1 --arch qwen2 --tied 0 --rope-freqs 1 "$2/qwen2.gguf"
}
