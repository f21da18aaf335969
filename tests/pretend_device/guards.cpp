// Devices that do nothing. PyTorch's C++ asks a guard which devices of a type there are and switches between them; a
// build without CUDA and MPS has no guards for these, and refuses every tensor that claims to be there.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

template <DeviceType kind, DeviceIndex devices>
struct IdleGuard final : c10::impl::DeviceGuardImplInterface {
  static thread_local DeviceIndex current;

  DeviceType type() const override { return kind; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  Device getDevice() const override { return {kind, current}; }
  void setDevice(Device to) const override { uncheckedSetDevice(to); }
  void uncheckedSetDevice(Device to) const noexcept override {
    if (to.has_index()) current = to.index();
  }
  Device exchangeDevice(Device to) const override {
    const Device before(kind, current);
    uncheckedSetDevice(to);
    return before;
  }

  // Streams are pretended in Python; here there is one, and work on it is over as soon as it is asked for.
  Stream getStream(Device of) const override { return Stream(Stream::DEFAULT, of.has_index() ? of : getDevice()); }
  Stream getNewStream(Device of, int) const override { return getStream(of); }
  Stream exchangeStream(Stream to) const override { return to; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

template <DeviceType kind, DeviceIndex devices>
thread_local DeviceIndex IdleGuard<kind, devices>::current = 0;

using CudaGuard = IdleGuard<DeviceType::CUDA, 2>;
using MpsGuard = IdleGuard<DeviceType::MPS, 1>;
C10_REGISTER_GUARD_IMPL(CUDA, CudaGuard)
C10_REGISTER_GUARD_IMPL(MPS, MpsGuard)

}  // namespace

// The backward pass asks for the accelerator of this machine, of which there is one.
static bool is_mps = false;
extern "C" void set_accelerator(bool mps) { is_mps = mps; }

namespace at {

struct IdleCudaHooks : CUDAHooksInterface {
  explicit IdleCudaHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return !is_mps; }
  bool isBuilt() const override { return !is_mps; }
  bool isAvailable() const override { return !is_mps; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 2; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
};

struct IdleMpsHooks : MPSHooksInterface {
  void init() const override {}
  bool hasMPS() const override { return is_mps; }
  bool isBuilt() const override { return is_mps; }
  bool isAvailable() const override { return is_mps; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
};

// PyTorch looks these classes up by name.
using CUDAHooks = IdleCudaHooks;
using MPSHooks = IdleMpsHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
REGISTER_MPS_HOOKS(MPSHooks)

}  // namespace at
