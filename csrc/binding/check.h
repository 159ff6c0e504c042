// Checks of raw op calls: only what keeps memory safe. flash_attn/checks.py has spoken before, in better sentences.
#pragma once

#include <sstream>
#include <stdexcept>

namespace flash {

// A RuntimeError in Python. (torch's own macro would put function, file and line before the sentence.)
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace flash

#define FLASH_CHECK(condition, ...) \
  if (!(condition)) ::flash::fail(__VA_ARGS__)
