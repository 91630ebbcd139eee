# cmake -DNM=... -DOBJECTS="a.o;b.o" -P weak_symbols.cmake: fails when an object defines a weak symbol.
# Objects of different instruction sets must have none: the linker keeps one copy of a weak symbol, and a copy with
# AVX-512 code could be called on a CPU without AVX-512.
if(NOT OBJECTS)
  message(FATAL_ERROR "there are no objects to look at")
endif()
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} -C --defined-only ${object} OUTPUT_VARIABLE symbols RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${NM} cannot read ${object}")
  endif()
  string(REGEX MATCHALL "[0-9a-f]* [WwVvu] [^\n]*" weak "${symbols}")
  if(weak)
    message(FATAL_ERROR "${object} defines weak symbols; make them static or put them in the namespace (csrc/vec/vec.h):\n${weak}")
  endif()
endforeach()
