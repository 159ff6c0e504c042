// Calls every kernel that a build selects, as the real dispatch does: a kernel that no unit defines stays undefined.

namespace flash::trivial {

template <int kHeadDim>
void launch_fwd(float* row);

}  // namespace flash::trivial

void run_every_kernel(float* row) {
#define FWD(family, arch, dtype, head_dim, variant) flash::family::launch_fwd<head_dim>(row);
#include "selected_kernels.def"
#undef FWD
}
