// Checks of raw op calls: only what keeps memory safe. flash_attn/checks.py has spoken before, in better sentences.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#define FLASH_CHECK(condition, ...) STD_TORCH_CHECK(condition, "flash_attn: ", __VA_ARGS__)
