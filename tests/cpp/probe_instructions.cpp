// program SET: executes instructions of every extension that micro-kernels of SET are compiled for, and ends normally on
// a CPU that has them all; on any other, the first one that is missing kills it (SIGILL).
//
// Assembly, so that no compiler flag is needed, under which other lines might contain such instructions too.
#include <cstdio>
#include <string_view>

int main(int argc, char** argv) {
  const std::string_view set = argc == 2 ? argv[1] : "";
  if (set == "portable") {
    // main itself, the C library and its start-up code
  } else if (set == "avx2") {
    asm volatile(
        "vpaddd %%ymm0, %%ymm0, %%ymm0\n"       // AVX2
        "vfmadd231ps %%ymm0, %%ymm0, %%ymm0\n"  // FMA
        "vzeroupper" ::
            : "xmm0");
  } else if (set == "avx512") {
    asm volatile(
        "vpaddd %%zmm0, %%zmm0, %%zmm0\n"               // F
        "vpmullq %%zmm0, %%zmm0, %%zmm0\n"              // DQ
        "vpaddb %%zmm0, %%zmm0, %%zmm0\n"               // BW
        "vpaddd %%xmm0, %%xmm0, %%xmm0%{%%k1%}%{z%}\n"  // VL
        "vzeroupper" ::
            : "xmm0");
  } else if (set == "avx512_bf16") {
    asm volatile(
        ".byte 0x62, 0xf2, 0x7e, 0x48, 0x52, 0xc0\n"  // vdpbf16ps %zmm0, %zmm0, %zmm0, for older assemblers
        "vzeroupper" ::
            : "xmm0");
  } else if (set == "amx") {
    asm volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0");  // tilerelease, which older assemblers do not know
  } else {
    std::printf("no instruction set has the name '%s'\n", argc == 2 ? argv[1] : "");
    return 2;
  }
}
