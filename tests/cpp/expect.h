// Checks of the test programs: the first that fails ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>

static long checks = 0;
#define EXPECT(condition)                                                   \
  do {                                                                      \
    ++checks;                                                               \
    if (!(condition)) {                                                     \
      std::printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                         \
    }                                                                       \
  } while (0)
