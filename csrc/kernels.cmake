# The compute kernels: every csrc/kernels/*.cpp is compiled once per instruction set into its own namespace.
# Target: the static library headrace_kernels, everything in csrc/ that does not need Python.

set(HEADRACE_KERNEL_SOURCES
  csrc/kernels/amx_attention.cpp
  csrc/kernels/amx_linear.cpp
  csrc/kernels/attention.cpp
  csrc/kernels/linear.cpp
  csrc/kernels/linear_direct.cpp
  csrc/kernels/low_rank.cpp
  csrc/kernels/pack.cpp
  csrc/kernels/probe.cpp
  csrc/kernels/quantize_act.cpp
  csrc/kernels/sample.cpp
)
set(HEADRACE_HOST_SOURCES
  csrc/attention/attention.cpp
  csrc/attention/kv_pool.cpp
  csrc/linear/linear.cpp
  csrc/pack/pack.cpp
  csrc/pack/scale_check.cpp
  csrc/program/buffers.cpp
  csrc/program/commands.cpp
  csrc/program/needs.cpp
  csrc/program/phases.cpp
  csrc/program/adapters.cpp
  csrc/program/profile.cpp
  csrc/program/program.cpp
  csrc/program/seal.cpp
  csrc/program/step.cpp
  csrc/program/streaming.cpp
  csrc/program/turns.cpp
  csrc/ranks/ranks.cpp
  csrc/sample/edits.cpp
  csrc/sample/filters.cpp
  csrc/sample/reject.cpp
  csrc/sample/sample.cpp
  csrc/system/arena.cpp
  csrc/system/isa.cpp
  csrc/system/kernels.cpp
  csrc/system/os_linux.cpp
  csrc/system/threadpool.cpp
)

set(HEADRACE_WARNINGS -O3 -Wall -Wextra)
if(NOT HEADRACE_MODULE)
  set(HEADRACE_WARNINGS -O1 -Wall -Wextra)
endif()
if(HEADRACE_SANITIZE)
  set(HEADRACE_SANITIZER -fsanitize=${HEADRACE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  if(HEADRACE_SANITIZE STREQUAL "address")
    list(APPEND HEADRACE_SANITIZER -fsanitize=undefined)
  endif()
  add_compile_options(${HEADRACE_SANITIZER})
  add_link_options(${HEADRACE_SANITIZER})
endif()
# No contraction: the kernels call fma where they round once, so that all paths and machines compute the same bits.
set(HEADRACE_KERNEL_FLAGS ${HEADRACE_WARNINGS} -ffp-contract=off -fno-math-errno -fno-exceptions -fno-rtti -Wno-psabi)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # gcc 12 warns about its own intrinsics headers
  list(APPEND HEADRACE_KERNEL_FLAGS -Wno-uninitialized -Wno-maybe-uninitialized)
endif()

set(HEADRACE_FLAGS_plain)
set(HEADRACE_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi -mbmi2)
set(HEADRACE_FLAGS_avxvnni ${HEADRACE_FLAGS_avx2} -mavxvnni)
set(HEADRACE_FLAGS_avx512vnni ${HEADRACE_FLAGS_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni
    -mprefer-vector-width=512)
set(HEADRACE_FLAGS_avx512 ${HEADRACE_FLAGS_avx512vnni} -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8)
set(HEADRACE_FLAGS_neon -march=armv8.2-a+dotprod)
set(HEADRACE_FLAGS_i8mm -march=armv8.2-a+dotprod+i8mm)

add_library(headrace_kernels STATIC ${HEADRACE_HOST_SOURCES})
set(HEADRACE_ISAS plain)
if(NOT HEADRACE_PLAIN AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  list(APPEND HEADRACE_ISAS avx512 avx512vnni avxvnni avx2)
  target_compile_definitions(headrace_kernels PUBLIC HEADRACE_X86)
elseif(NOT HEADRACE_PLAIN AND CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
  list(APPEND HEADRACE_ISAS neon i8mm)
  target_compile_definitions(headrace_kernels PUBLIC HEADRACE_ARM)
endif()

foreach(isa IN LISTS HEADRACE_ISAS)
  add_library(headrace_${isa} OBJECT ${HEADRACE_KERNEL_SOURCES})
  target_include_directories(headrace_${isa} PRIVATE csrc)
  target_compile_definitions(headrace_${isa} PRIVATE HEADRACE_ISA=${isa})
  target_compile_options(headrace_${isa} PRIVATE ${HEADRACE_KERNEL_FLAGS} ${HEADRACE_FLAGS_${isa}})
  set_target_properties(headrace_${isa} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_sources(headrace_kernels PRIVATE $<TARGET_OBJECTS:headrace_${isa}>)
  if(CMAKE_NM AND NOT HEADRACE_SANITIZE)
    set(stamp ${CMAKE_CURRENT_BINARY_DIR}/headrace_${isa}_symbols.stamp)
    add_custom_command(OUTPUT ${stamp}
      COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM} "-DOBJECTS=$<TARGET_OBJECTS:headrace_${isa}>"
              -P ${CMAKE_CURRENT_SOURCE_DIR}/csrc/weak_symbols.cmake
      COMMAND ${CMAKE_COMMAND} -E touch ${stamp}
      DEPENDS headrace_${isa} $<TARGET_OBJECTS:headrace_${isa}> ${CMAKE_CURRENT_SOURCE_DIR}/csrc/weak_symbols.cmake
      COMMENT "No weak symbols in the ${isa} kernels"
      VERBATIM)
    target_sources(headrace_kernels PRIVATE ${stamp})
  endif()
endforeach()

target_include_directories(headrace_kernels PUBLIC csrc)
target_compile_options(headrace_kernels PRIVATE ${HEADRACE_WARNINGS} -ffp-contract=off)
target_link_libraries(headrace_kernels PUBLIC Threads::Threads)
set_target_properties(headrace_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON)
