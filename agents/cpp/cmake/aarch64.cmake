# Toolchain for 64-bit ARM on a Debian host of another architecture: crossbuild-essential-arm64, and the libraries' packages
# with the suffix :arm64, which Debian installs beside the host's own.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_STRIP aarch64-linux-gnu-strip)
set(CMAKE_OBJCOPY aarch64-linux-gnu-objcopy)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
# GCC notes for each pair of doubles that its ABI of 2020 passes them otherwise.
set(CMAKE_CXX_FLAGS_INIT -Wno-psabi)
# Else pkg-config finds the host's libraries, of which the linker says only that their format is wrong.
set(ENV{PKG_CONFIG_LIBDIR} /usr/lib/aarch64-linux-gnu/pkgconfig:/usr/share/pkgconfig)
find_program(QEMU qemu-aarch64-static)
if(QEMU)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${QEMU})
endif()
